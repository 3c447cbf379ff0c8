"""Block selection in Triton, run by its interpreter or a GPU, against the formula written out densely in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from flexnsa import NSAConfig
from flexnsa.attention.interface import Call
from flexnsa.attention.triton.selection import MANY_PROGRAMS, SCRATCH_BYTES, chunks, launch_selection
from flexnsa.config import num_blocks, num_compressed
from flexnsa.masks.positions import Positions
from tests.support import triton_selection
from tests.support.comparison import at_precision_of_gpu
from tests.support.interpreter import Interpret
from tests.support.triton_selection import CASES, PRODUCTS, dense_lse_and_importance, ranks, select


@pytest.mark.parametrize("name", CASES)
def test_importance_and_lse_match_the_dense_formula_and_choose_the_stable_top_n(name: str, compute: Interpret) -> None:
    """Within roundings of fp32 and, on a GPU, twice the error of a tanh of its precision."""
    case, got = CASES[name], compute(triton_selection, name)
    plain = dense_lse_and_importance(at_precision_of_gpu(case) if got["on_gpu"] else case)
    results = (got["lse"], 1e-6), (got["importance"], 1e-7 * case.group)
    for (result, atol), want, other in zip(results, dense_lse_and_importance(case), plain, strict=True):
        atol += 2 * (other - want).nan_to_num().abs().max().item()
        torch.testing.assert_close(result.double(), want, rtol=1e-6, atol=atol)
    assert torch.equal(got["selected"], select(CASES[name], got["importance"]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.zero])
def test_selection_matches_the_dense_formula(name: str, interpret: Interpret) -> None:
    """Where no two candidates around the n-th place are closer than rounding can tell."""
    case, got = CASES[name], interpret(triton_selection, name)
    importance = dense_lse_and_importance(case)[1]
    ordered = ranks(case, importance).sort(-1, descending=True).values
    ordered = torch.nn.functional.pad(ordered, (0, case.config.num_selected_blocks + 1), value=float("-inf"))
    last_in, first_out = (
        ordered[..., case.config.num_selected_blocks - 1],
        ordered[..., case.config.num_selected_blocks],
    )
    clear = (last_in - first_out > 1e-5) | (first_out == float("-inf"))
    assert clear.float().mean() > 0.98
    wanted = select(case, importance)
    assert torch.equal(got["selected"][clear], wanted[clear])


def test_equal_scores_select_the_lowest_indices(interpret: Interpret) -> None:
    """All-zero queries: block 0 lacks the key that would reach into it, every later whole block ties."""
    last = interpret(triton_selection, "ties")["selected"][0, 0, -1]
    assert last.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", PRODUCTS)
def test_blocks_by_products_are_those_of_chunks(name: str, compute: Interpret) -> None:
    chosen = compute(triton_selection, name)
    assert torch.equal(chosen["got"], chosen["want"])


@pytest.mark.parametrize("heads", [1, 4, 32])
@pytest.mark.parametrize("width", [None, 16, 8192])
def test_chunks_hold_every_query_once_and_fill_a_gpu(width: int | None, heads: int) -> None:
    config = NSAConfig()
    plan = list(chunks(524288, heads, width, config))
    assert [first for first, _, _ in plan] == [0, *itertools.accumulate(rows for _, rows, _ in plan)][:-1]
    assert sum(rows for _, rows, _ in plan) == 524288
    for first, rows, blocks in plan[:-1]:
        assert rows * heads >= MANY_PROGRAMS
        assert blocks >= (width or num_blocks(first + rows, config))
        unaligned = blocks - 16
        assert 8 * heads * rows * unaligned <= max(SCRATCH_BYTES, 8 * blocks * MANY_PROGRAMS)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [5, 64, 1000])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("config", [NSAConfig(), NSAConfig.for_text(12, 2).scoring])
def test_kernels_for_hopper_score_as_those_that_take_positions(config: NSAConfig, dim: int, length: int) -> None:
    from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp

    q = torch.randn(2, 12, length, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(2, 2, num_compressed(length, config), dim, device="cuda", dtype=torch.bfloat16)
    where, options = Positions.of_sequence(length, "cuda"), {"config": config, "factors": (dim**-0.5, 0.0)}
    got, lse = (log_sum_exp(q, k, positions, **options) for positions in (None, where))
    torch.testing.assert_close(got, lse, rtol=1e-6, atol=1e-6)
    calls = (Call(config, dim**-0.5, positions=positions) for positions in (None, where))
    assert torch.equal(*(launch_selection(q, k, lse, call) for call in calls))
