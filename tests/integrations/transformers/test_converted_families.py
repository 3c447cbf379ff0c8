"""Types of models, most of which no code of the library names: calls are right or refused by name, converted or not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from flexnsa import NSAConfig
from flexnsa.transformers import convert, to_dense
from flexnsa.transformers.attention import ConvertedAttention
from tests.integrations.transformers.families import ALL, in_steps, tokens
from tests.integrations.transformers.model_types import APART, CALLS, verdicts
from tests.integrations.transformers.tiny_models import FAMILIES, dense_model, few_blocks, tiny_model

RECORDED = Path(__file__).parent / "recorded"
NOT_CONVERTED = {
    "bert": "bert.encoder.layer.0.attention.self: expected attention that is called once",
    "deepseek_v3": "q_proj: expected a projection of that name in attention, got q_a_proj",
    "diffllama": "model.layers.0.self_attn: expected queries, keys and values",
    "doge": "attention_mask: expected attention that computes nothing from its mask, got a DogeAttention",
    "falcon_h1": "layer_types: expected layers with attention or a recurrence",
    "gemma3": "model: expected one of the causal models of text",
    "inkling_text": "layer_types: expected layers with attention or a recurrence",
    "laguna": "model.layers.0.self_attn: expected the output of o_proj alone",
    "llama4_text": "model.layers.1.self_attn: expected attention that does not look at the length of its cache",
    "mamba": "model: expected layers of full causal attention",
    "minimax": "(cache|past_key_values): expected a model that takes any cache",
}


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_selected_branch_alone_is_the_dense_model_in_every_call(kind: str) -> None:
    model = dense_model(kind)
    same = convert(model, NSAConfig(**ALL), branches=["slc"])
    for name, call in CALLS.items():
        mixes = name in APART and kind in ("olmo_hybrid", "qwen3_next")  # their linear layers see all documents
        want = call(model) if mixes else APART.get(name, call)(model)
        assert_close(call(same), want, atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    again = to_dense(same)
    assert type(again) is type(model)
    assert {*again.state_dict()} == {*model.state_dict()}
    assert_close(CALLS["plain"](again), CALLS["plain"](model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "glm4", "gpt_oss", "olmo2", "phi3"])
def test_the_selected_branch_alone_has_the_gradients_of_the_dense_model(kind: str) -> None:
    model, x = dense_model(kind), tokens(2, 40)
    model.config._experts_implementation = "eager"
    model = model.double()
    same = convert(model, NSAConfig(**ALL), branches=["slc"])
    for each in (model, same):
        each(x, labels=x, use_cache=False).loss.backward()
    for parameter in same.parameters():
        parameter.data = parameter.grad
    gradients, expected = to_dense(same).state_dict(), {name: x.grad for name, x in model.named_parameters()}
    assert_close({name: gradients[name] for name in expected}, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
def test_steps_equal_whole_sequences_before_and_after_saving(kind: str, tmp_path: Path) -> None:
    model, x = few_blocks(kind), tokens(2, 60)
    want = model(x, use_cache=False).logits
    assert_close(in_steps(model, x, 45, 52), want, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert type(again) is type(model)
    assert_close(again(x, use_cache=False).logits, want, atol=1e-4, rtol=1e-4)
    few = {name for name, layer in again.named_modules() if isinstance(layer, ConvertedAttention)}
    assert len(few) == (getattr(again.config, "layer_types", None) or ["full_attention"] * 2).count("full_attention")


@pytest.mark.parametrize("kind", NOT_CONVERTED)
@pytest.mark.parametrize("copy", [True, False])
def test_a_model_that_cannot_be_converted_is_refused_and_stays(kind: str, copy: bool) -> None:
    model = tiny_model(kind)
    with torch.no_grad():
        want = CALLS["plain"](model)
    with pytest.raises(ValueError, match=NOT_CONVERTED[kind]):
        convert(model, NSAConfig(), copy=copy)
    with torch.no_grad():
        assert torch.equal(CALLS["plain"](model), want)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["glm4", "gpt_oss", "qwen3_moe"])
def test_models_of_narrow_types_are_converted(kind: str, dtype: torch.dtype) -> None:
    model = convert(tiny_model(kind).to(dtype), NSAConfig())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@torch.no_grad()
def test_models_that_an_earlier_version_saved_are_loaded() -> None:
    model = AutoModelForCausalLM.from_pretrained(RECORDED / "qwen3")
    x = torch.arange(48)[None] * 7 % 13 + 2
    want = load_file(RECORDED / "qwen3" / "logits.safetensors")["logits"]
    assert_close(model(x, use_cache=False).logits, want, atol=1e-5, rtol=1e-5)


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
