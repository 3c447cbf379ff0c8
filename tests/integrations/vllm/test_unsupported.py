"""What cannot be served is refused by name; no model comes back dense without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import flexnsa.transformers  # noqa: F401  (registers the attention)
from flexnsa import NSAConfig
from flexnsa.vllm.unsupported import refuse_layers
from tests.integrations.vllm.engines import engine
from tests.integrations.vllm.references import DENSE, Reference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "block_size: expected a multiple of the stride 16, got 24"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected 'auto'"),
        ({"quantization": "experts_int8"}, "quantization: expected None or 'fp8' .* got 'experts_int8'"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "kv_transfer_config: expected None .* got KVTransferConfig"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size: expected None .* got 1.0"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size: expected a divisor of num_kv_heads=2, got 4"),
        ({"model_impl": "transformers"}, "model_impl: expected 'auto' or 'vllm'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: .* got 2: .* layer [12] reads the index of layer 0"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size: expected 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size: expected 1 .* got 2"),
        ({"hf_overrides": {"tie_word_embeddings": True}}, "tie_word_embeddings: expected False"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_of_the_engine(reference: Callable[[str], Reference], options: dict[str, Any], message: str) -> None:
    for name in ("rank", "qwen3") if "pipeline_parallel_size" in options else ("rank",):
        with pytest.raises(ValueError, match=message), engine(reference(name).folder, **options):
            pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected 'full_attention'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: expected 'default' or"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1.0"),
        ({"flexnsa": {"rotary": "interleaved"}}, "rotary: expected 'halves'"),
        ({"flexnsa": {"softcap": 30.0}}, "softcap: expected None"),
        ({"flexnsa": asdict(NSAConfig.msa())}, "index_score: expected None"),
        ({"flexnsa": {"opening": -1.0}}, "opening: expected at least 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_layers_of_converted_models(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refuse_layers(SimpleNamespace(**fields))


def test_a_dense_model_with_the_attention_of_flexnsa(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**DENSE))
    model.set_attn_implementation("flexnsa")
    model.save_pretrained(tmp_path)
    with (
        pytest.raises(ValueError, match="attn_implementation: expected a model whose layers are NSA"),
        engine(tmp_path),
    ):
        pass


def test_models_that_have_no_class_here(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    config = json.loads((reference("paper").folder / "config.json").read_text())
    config["architectures"] = ["FlexNSAGemma3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="architectures: expected 'FlexNSAForCausalLM' or "), engine(tmp_path):
        pass
