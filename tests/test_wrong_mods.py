"""Mods that are no functions, or give what no score and no mask is, are named before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import mods
from tests.support.inputs import attend_with_aux, make_inputs


def test_wrong_mods_are_named() -> None:
    inputs = make_inputs(40).to(torch.float32)
    captured = torch.randn(3, requires_grad=True)

    def number(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return q_idx - kv_idx

    def score_of(make: Callable[[Tensor], Any]) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, q_idx, kv_idx: make(score)}  # noqa: ARG005

    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"score_mod": 3}, TypeError, "score_mod: expected a function, got 3"),
        ({"mask_mod": "causal"}, TypeError, "mask_mod: expected a function"),
        ({"mask_mod": number}, ValueError, "mask_mod: expected it to return torch.bool, got torch.int32"),
        ({"mask_mod": lambda *_: True}, TypeError, "mask_mod: expected it to return a tensor, got True"),
        (score_of(lambda score: score > 0), ValueError, "score_mod: expected it to return a floating dtype"),
        (score_of(lambda score: score + torch.zeros(3)), ValueError, r"score_mod: .* shape \(\), got \(3,\)"),
        ({"mask_mod": lambda score: score > 0}, ValueError, r"mask_mod: .* \(b, h, q_idx, kv_idx\), got TypeError"),
        (
            score_of(lambda score: score if score > 0 else -score),
            ValueError,
            "score_mod: expected .*, got RuntimeError",
        ),
        ({"score_mod": mods.alibi(torch.ones(3))}, ValueError, "score_mod: expected .*, got IndexError"),
        (
            score_of(lambda score: score + captured[0]) | {"impl": "flex"},
            ValueError,
            "score_mod: captures a tensor that requires a gradient",
        ),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            attend_with_aux(inputs, **options)
    with pytest.raises(ValueError, match="stop: expected at least 5, got 4"):
        mods.banned_span(4, 4)
    with pytest.raises(ValueError, match=r"slopes: expected shape \(Hq,\)"):
        mods.alibi(torch.zeros(2, 2))
