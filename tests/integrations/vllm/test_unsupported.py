"""What cannot be served is refused by name; no model comes back dense without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import flexnsa.transformers  # noqa: F401  (registers the attention)
from tests.integrations.vllm.engines import engine
from tests.integrations.vllm.references import Reference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, "block_size: expected a multiple of the stride 16, got 24"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: expected 'auto'"),
        ({"model_impl": "transformers"}, "model_impl: expected 'auto' or 'vllm'"),
        ({"pipeline_parallel_size": 2}, "[Pp]ipeline"),
        ({"enable_lora": True}, "LoRA"),
        ({"hf_overrides": {"tie_word_embeddings": True}}, "tie_word_embeddings: expected False"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_of_the_engine(reference: Callable[[str], Reference], options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message), engine(reference("paper").folder, **options):
        pass


def test_a_dense_model_with_the_attention_of_flexnsa(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256))
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
    with pytest.raises(ValueError, match="architectures: expected one of FlexNSAForCausalLM"), engine(tmp_path):
        pass
