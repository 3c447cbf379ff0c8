"""Types of models, one for each thing that they have that others have not: all calls are right or refused by name."""

from __future__ import annotations

import re

import pytest

from tests.integrations.transformers.model_types import CALLS, verdicts

RIGHT = {
    "afmoe": "takes a view of what attention gives",
    "bert": "mixes packed documents by itself",
    "deepseek_v3": "latent attention",
    "falcon_h1": "attention beside a recurrence in each layer",
    "gemma2": "a cap on scores, and sliding layers",
    "gemma3n_text": "sliding layers whose masks sdpa makes",
    "gpt_bigcode": "no positions for layers",
    "gpt_oss": "attention sinks, and sliding layers",
    "llama4_text": "chunked layers",
    "phi3": "fused projections",
    "qwen3_next": "linear layers",
    "roberta": "positions from an offset",
    "zamba2": "one attention module for several layers",
}
PARTLY = {"bart": {"packed", "packed rows"}, "minimax": {"generate", "static cache"}}
"""Calls that are refused; the others are right, but for what the dense model cannot do either."""
REFUSED = {
    "bart": "position_ids: expected None",
    "bigbird_pegasus": "is_causal: expected True",
    "bloom": "attn_implementation: expected 'flexnsa' of a model that takes its attention from",
    "deepseek_v32": "layer_types: expected some of .* got .'indexed_attention'",
    "doge": r"attention_mask: expected \(B, S\)",
    "gptj": "attn_implementation: expected 'flexnsa' of a model that takes its attention from",
    "inkling_text": "position_bias: expected None",
    "mamba": "layer_types: expected some 'full_attention' .* got .'linear_attention'",
    "minimax": r"attention_mask: expected \(B, 1\), all tokens so far",
    "ministral": "layer_types: expected some 'full_attention' .* got .'sliding_attention'",
    "xlstm": "attn_implementation: expected 'flexnsa' of a model with layers that take their attention from",
}


@pytest.mark.parametrize("model_type", RIGHT)
def test_a_type_of_models_attends_as_its_dense_model(model_type: str) -> None:
    assert verdicts(model_type) == dict.fromkeys(CALLS, "right")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_asks_for_more_is_refused(model_type: str) -> None:
    found = {call: x for call, x in verdicts(model_type).items() if not x.startswith("dense fails")}
    refused = {call for call, verdict in found.items() if verdict != "right"}
    assert refused == PARTLY.get(model_type, found.keys())
    for call in refused:
        assert re.match(f"refused: {REFUSED[model_type]}", found[call]), found[call]
