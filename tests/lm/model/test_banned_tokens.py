"""Tokens of a logit of -inf are never drawn, at any temperature; the others are drawn as often as they should be."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa.lm import Sampling
from tests.lm.model.sessions import make_model, prompts

LOGITS = [-math.inf, 0.0, 3.0, -math.inf, 1.0, 2.0, -math.inf]
OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_k": 5}, {"top_k": 9}, {"top_k": 3, "top_p": 0.9}]
OPTIONS += [{"top_p": 5e-324}, {"top_p": 0.6}, {"top_p": 1.0}]
TEMPERATURES = [0.0, 5e-324, 1e-40, 1e-3, 1.0, 50.0, 1e30, math.inf]


def frequencies(sampling: Sampling, dtype: torch.dtype, count: int = 4000) -> Tensor:
    rows = torch.tensor([LOGITS], dtype=dtype).repeat(count, 1)
    return torch.bincount(sampling.draw(rows, torch.Generator().manual_seed(0)), minlength=len(LOGITS)) / count


def probabilities(temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The likeliest tokens by their logits, as Python's numbers have them."""
    ranked = sorted((x for x in LOGITS if x != -math.inf), reverse=True)
    weights = [math.exp((x - ranked[0]) / max(temperature, 5e-324)) if x < ranked[0] else 1.0 for x in ranked]
    weights = [x / sum(weights) for x in weights[:top_k]] if top_k is None else weights[:top_k]
    total, kept = sum(weights), list[float]()
    for weight in weights:
        if top_p is None or not kept or sum(kept) < top_p * total * (1 - 1e-6):
            kept.append(weight)
    share = dict(zip(ranked, kept, strict=False))
    return torch.tensor([share.get(x, 0.0) / sum(kept) for x in LOGITS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_frequencies_are_those_of_what_is_allowed(
    temperature: float, options: dict[str, Any], dtype: torch.dtype
) -> None:
    expected = probabilities(temperature, options.get("top_k"), options.get("top_p"))
    found = frequencies(Sampling(temperature=temperature, **options), dtype)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert found[expected == 0].max() == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("largest", [math.inf, -math.inf, math.nan])
def test_a_largest_logit_that_is_not_finite_is_refused(largest: float, temperature: float) -> None:
    logits = torch.tensor([[-math.inf, largest, -math.inf]])
    with pytest.raises(FloatingPointError, match=r"^logits: expected finite numbers, got \[.*\] as the largest"):
        Sampling(temperature=temperature).draw(logits, torch.Generator())


@pytest.mark.parametrize("options", [{}, {"cached": False}, {"steps": "compiled"}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, math.inf])
def test_generation_draws_no_token_that_the_head_bans(temperature: float, options: Any, monkeypatch: Any) -> None:
    model, allowed = make_model("dense", num_layers=1), [3, 97, 200]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor's C++ takes seconds

    def ban(_head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf).index_copy(-1, torch.tensor(allowed), logits[..., allowed])

    model.head.register_forward_hook(ban)
    rows = model.generate(prompts(3, 5), 40, sampling=Sampling(temperature=temperature), **options)
    drawn = {token for row in rows for token in row}
    assert drawn <= {*allowed}
    assert drawn == {*allowed} or temperature == 1
