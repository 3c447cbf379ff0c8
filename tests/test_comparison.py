"""The comparison of the parity tests is worth nothing if it passes what is wrong."""

from __future__ import annotations

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


@pytest.mark.parametrize("wrong", [23, 25])
def test_it_rejects_a_window_off_by_one(wrong: int) -> None:
    got = run(replace(SMALL, window_size=wrong))
    with pytest.raises(AssertionError, match="out: rms error"):
        assert_as_exact_as_plain(got, run(SMALL), exact(), factor=2)


def test_it_rejects_half_the_precision() -> None:
    got = {"out": run(SMALL)["out"].bfloat16().float()}
    with pytest.raises(AssertionError, match="out: rms error"):
        assert_as_exact_as_plain(got, run(SMALL), exact(), factor=3)


def test_it_rejects_one_wrong_element() -> None:
    got = run(SMALL)
    got["out"].view(-1)[100] += 1e-5
    with pytest.raises(AssertionError, match="out: max error"):
        assert_as_exact_as_plain(got, run(SMALL), exact(), factor=3)


def test_it_rejects_nan() -> None:
    got = run(SMALL)
    got["out"].view(-1)[100] = torch.nan
    with pytest.raises(AssertionError, match="finite"):
        assert_as_exact_as_plain(got, run(SMALL), exact(), factor=3)
