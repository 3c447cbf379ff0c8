"""The comparison of the parity tests is worth nothing if it passes what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig, sliding_window_attention
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL, make_inputs


def run(config: NSAConfig) -> dict[str, Tensor]:
    x = make_inputs(77, dtype=torch.float32)
    return {"out": sliding_window_attention(x.q, x.k_win, x.v_win, config=config, impl="reference")[0]}


def exact() -> dict[str, Tensor]:
    x = make_inputs(77, dtype=torch.float32).to(torch.float64)
    return {"out": sliding_window_attention(x.q, x.k_win, x.v_win, config=SMALL, impl="reference")[0]}


def test_it_passes_the_plain_formula() -> None:
    assert_as_exact_as_plain(run(SMALL), run(SMALL), exact(), factor=1)


def changed(value: float) -> dict[str, Tensor]:
    out = run(SMALL)["out"]
    out.view(-1)[100] += value
    return {"out": out}


WRONG: dict[str, tuple[int, Callable[[], dict[str, Tensor]], str]] = {
    "a window of 23": (2, lambda: run(replace(SMALL, window_size=23)), "out: rms error"),
    "a window of 25": (2, lambda: run(replace(SMALL, window_size=25)), "out: rms error"),
    "half the precision": (3, lambda: {"out": run(SMALL)["out"].bfloat16().float()}, "out: rms error"),
    "one wrong element": (3, lambda: changed(1e-5), "out: max error"),
    "NaN": (3, lambda: changed(torch.nan), "finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_rejects_what_is_wrong(name: str) -> None:
    factor, wrong, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        assert_as_exact_as_plain(wrong(), run(SMALL), exact(), factor=factor)
