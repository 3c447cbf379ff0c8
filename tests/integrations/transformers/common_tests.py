"""transformers' own tests of what every model does, on the library's decoder and on a converted Llama.

They are in no wheel: ``make transformers-common CHECKOUT=/path/to/transformers`` takes them from a checkout of its
repository, of the version that is installed. Nothing else collects this file. Of the library's decoder 3 fail and of a
converted Llama 6, all by the limits that docs/transformers.md names.
"""

from __future__ import annotations

import unittest
from typing import Any, cast

import torch
from tests.generation.test_utils import GenerationTesterMixin  # pyright: ignore[reportMissingImports]
from tests.test_modeling_common import ModelTesterMixin, ids_tensor  # pyright: ignore[reportMissingImports]
from transformers.models.auto import modeling_auto as known

from flexnsa.lm.transformers_model import FlexNSAConfig, FlexNSAForCausalLM
from flexnsa.transformers import FlexNSACache
from flexnsa.transformers.cache import FlexNSACacheLayer
from flexnsa.transformers.classes import FlexNSALlamaConfig, FlexNSALlamaForCausalLM, FlexNSALlamaModel

# The tests tell models with a head, which have a loss, from those without by these tables of transformers' own.
known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["flexnsa"] = FlexNSAForCausalLM.__name__
known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["flexnsa_llama"] = FlexNSALlamaForCausalLM.__name__
known.MODEL_MAPPING_NAMES["flexnsa_llama"] = FlexNSALlamaModel.__name__

NSA = {
    "compress_block_size": 4,
    "compress_stride": 2,
    "select_block_size": 4,
    "num_selected_blocks": 3,
    "num_init_blocks": 1,
    "num_local_blocks": 1,
    "window_size": 4,
}


class Tester:
    """What the mixins ask of a model: a small config, and a batch padded on the left."""

    batch_size, seq_length, is_training = 4, 12, True
    hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 32, 2, 4, 2
    vocab_size = 99

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).clamp_min(3)  # none of them special
        mask = torch.ones_like(ids).tril().flip(1)
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}

    def get_config(self) -> Any:
        raise NotImplementedError


class DecoderTester(Tester):
    def get_config(self) -> Any:
        return FlexNSAConfig(
            dim=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=8,
            vocab_size=self.vocab_size,
            nsa=NSA,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )


class ConvertedTester(Tester):
    def get_config(self) -> Any:
        return FlexNSALlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=64,
            flexnsa=NSA,  # pyright: ignore[reportCallIssue]  (dataclasses take no mixins' fields)
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )


class Common(ModelTesterMixin, GenerationTesterMixin):
    has_attentions = False  # no probabilities to give

    def test_left_padding_compatibility(self) -> None:
        """Models without probabilities are taken for recurrent ones, which cannot be padded."""
        self.has_attentions = True
        super().test_left_padding_compatibility()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        """Replaces a look at dense keys and values, which is there to be replaced by models with other caches."""
        assert isinstance(past_key_values, FlexNSACache)
        assert len(past_key_values) == config.num_hidden_layers
        assert {cast("FlexNSACacheLayer", layer).batch_size for layer in past_key_values.layers} == {batch_size}
        assert past_key_values.get_seq_length() == seq_length


class DecoderTest(Common, unittest.TestCase):
    all_model_classes = (FlexNSAForCausalLM,)

    def setUp(self) -> None:
        self.model_tester = DecoderTester()


class ConvertedTest(Common, unittest.TestCase):
    all_model_classes = (FlexNSALlamaModel, FlexNSALlamaForCausalLM)

    def setUp(self) -> None:
        self.model_tester = ConvertedTester()
