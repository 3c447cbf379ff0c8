"""Each option of ``generate`` gives what the dense model gives, or is refused by name, for every kind of model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from flexnsa import NSAConfig
from flexnsa.transformers import convert
from flexnsa.transformers.cache import CACHE
from tests.integrations.transformers.families import ALL, dense, own, pad_left, sparse, tokens
from tests.integrations.transformers.test_mixed_layers import mixed

ROWS = pad_left([tokens(40), tokens(31)])
ONE = {"input_ids": tokens(1, 12).repeat(1, 4), "attention_mask": torch.ones(1, 48, dtype=torch.int64)}
"""Repeats itself, so that drafts are accepted; longer than the window of mixed models."""
EAGER = CompileConfig(backend="aot_eager", fullgraph=False)
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "cutoffs": {"do_sample": True, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4, "num_return_sequences": 2},
    "top_h": {"do_sample": True, "top_h": 0.5},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "sampled beams": {"num_beams": 2, "do_sample": True, "early_stopping": "never", "renormalize_logits": True},
    "lengths": {"min_new_tokens": 4, "min_length": 44, "eos_token_id": [5, 6]},
    "no cache": {"use_cache": False},
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static", "max_cache_len": 100},
    "compiled": {"cache_implementation": "static", "compile_config": EAGER},
    "not compiled": {"disable_compile": True},
    "details": DETAILS,
    "details of beams": {"num_beams": 2, **DETAILS},
    "chunks": {"prefill_chunk_size": 8},
    "penalties": {"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "bans": {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [4], "begin_suppress_tokens": [8]},
    "forced": {"forced_bos_token_id": 3, "forced_eos_token_id": 4, "remove_invalid_values": True},
    "biases": {"sequence_bias": [[[5], -3.0]], "exponential_decay_length_penalty": (2, 1.1), "eos_token_id": 5},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig()},
    "synthid": {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
    "prefix": {"prefix_allowed_tokens_fn": lambda *_: [5, 6, 7]},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
    "long lookup": {"prompt_lookup_num_tokens": 100},
    "sampled lookup": {"prompt_lookup_num_tokens": 4, "do_sample": True},
    "assistant": {"assistant_model": True, "num_assistant_tokens": 7, "output_hidden_states": True, **DETAILS},
    "sampled assistant": {"assistant_model": True, "do_sample": True, "assistant_confidence_threshold": 0.4},
    "early exit": {"assistant_early_exit": 1},
}
"""Of one row: transformers drafts for no more."""
CACHED = ("greedy", "beams", "no cache", "dynamic", "static", "compiled", "chunks", "guidance", *DRAFTS)
"""What changes how tokens pass through layers; the others, tried with one kind, change draws."""
REFUSED: dict[tuple[str, str], str] = {
    ("own", "early exit"): "assistant_early_exit: expected None of a FlexNSAForCausalLM, got 1"
}
UNLIKE = ("offloaded", "offloaded_static", "quantized", "sliding_window")


def selecting_all(model: Any) -> Any:
    """Convert to layers that equal the dense ones."""
    return convert(model, NSAConfig(**ALL), branches=["slc"])


MAKE: dict[str, Callable[[], Any]] = {
    "dense": lambda: dense("qwen3"),
    "drop-in": lambda: sparse("qwen3", ALL),
    "converted": lambda: selecting_all(dense("qwen3")),
    "own": own,
    "mixed, dense": lambda: mixed("gemma3", "sdpa"),
    "mixed, drop-in": lambda: mixed("gemma3", **ALL),
    "mixed, converted": lambda: selecting_all(mixed("gemma3", "sdpa")),
}
ORACLE = {
    "drop-in": "dense",
    "converted": "dense",
    "mixed, drop-in": "mixed, dense",
    "mixed, converted": "mixed, dense",
}
"""What has to be equal; ``own`` is compared with itself, without a cache."""


@cache
def made(kind: str) -> Any:
    return MAKE[kind]()


def generated(kind: str, option: str, **others: Any) -> dict[str, Any]:
    """Generate with an option; the past is left out of what is returned."""
    options = {**(DRAFTS[option] if option in DRAFTS else OPTIONS[option]), **others}
    if options.get("assistant_model"):
        options["assistant_model"] = MAKE[kind]()
    inputs = ONE if option in DRAFTS else ROWS
    shared = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model = made(kind)
    torch.manual_seed(3)  # after the model is made, which draws its weights
    out = model.generate(**inputs, **{**shared, **options})
    found = {"sequences": out} if isinstance(out, Tensor) else dict(out)
    found.pop(CACHE, None)
    return found


@cache
def expected(kind: str, option: str) -> dict[str, Any]:
    if kind in ORACLE:
        return generated(ORACLE[kind], option)
    plain = {"use_cache": False, "cache_implementation": None, "compile_config": None, "prefill_chunk_size": None}
    drafts = {"prompt_lookup_num_tokens": None, "assistant_model": None, "assistant_early_exit": None}
    return generated(kind, option, **plain, **drafts)


PAIRS = [(kind, option) for kind in (*ORACLE, "own") for option in CACHED]
PAIRS += zip(
    cycle(("drop-in", "converted", "own")), (option for option in OPTIONS if option not in CACHED), strict=False
)


@pytest.mark.parametrize(("kind", "option"), PAIRS)
def test_an_option_gives_what_the_dense_model_gives(kind: str, option: str) -> None:
    if (kind, option) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[kind, option]):
            generated(kind, option)
        return
    if kind == "own" and "do_sample" in DRAFTS.get(option, {}):  # the drafts draw random numbers, too
        assert generated(kind, option)["sequences"].shape == (1, 56)
        return
    found, wanted = generated(kind, option), expected(kind, option)
    if kind not in ORACLE:  # without a cache all tokens have hidden states
        for output in (found, wanted):
            output.pop("hidden_states", None)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*ORACLE, "own"])
def test_probabilities_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="output_attentions: expected None or False"):
        made(kind).generate(**ROWS, max_new_tokens=2, return_dict_in_generate=True, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: expected None or False"):
        made(kind)(**ROWS, output_attentions=True)


@pytest.mark.parametrize("kind", ["converted", "own", "mixed, converted"])
@pytest.mark.parametrize("unlike", UNLIKE)
def test_a_cache_that_nsa_layers_have_not_is_refused(kind: str, unlike: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation: expected None for NSA layers, got '{unlike}'"):
        made(kind).generate(**ROWS, max_new_tokens=2, cache_implementation=unlike)
