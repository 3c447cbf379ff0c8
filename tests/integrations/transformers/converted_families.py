"""Tiny models of the families that are converted, and how one is called in steps."""

from __future__ import annotations

from typing import Any

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from tests.integrations.transformers.families import FEW, alive
from tests.integrations.transformers.tiny_models import tiny_model

FAMILIES = {
    "cohere": "neighbouring channels rotated together",
    "gemma2": "a cap on scores, and sliding layers",
    "gemma3_text": "sliding layers with other angles",
    "glm4": "a part of the channels rotated, neighbours together",
    "gpt_oss": "sinks, biases, and sliding layers",
    "granite": "a scale of its own",
    "llama": "nothing else",
    "mistral": "nothing else",
    "mixtral": "experts",
    "olmo2": "norms of all heads together",
    "olmo_hybrid": "linear layers",
    "phi3": "one projection for queries, keys and values",
    "qwen2": "biases",
    "qwen3": "norms of each head",
    "qwen3_moe": "experts",
    "smollm3": "layers that do not rotate",
}


def dense_model(kind: str) -> Any:
    """Make a tiny model whose layers, if it has layers that do not rotate, do and do not."""
    model = tiny_model(kind)
    if kind == "smollm3":
        model.config.no_rope_layers = [1, 0]
        model = type(model)._from_config(model.config, attn_implementation="eager").eval()
    return model


def few_blocks(kind: str) -> Any:
    """Make a converted model of three branches that leaves blocks out, in float64, where none score the same."""
    model = dense_model(kind)
    model.config._experts_implementation = "eager"  # the others take no float64
    return alive(convert(model.double(), NSAConfig(**FEW)))
