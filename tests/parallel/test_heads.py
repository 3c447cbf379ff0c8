"""Heads sharded over ranks compute the same as heads on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parallel.conftest import RunOnce
from tests.parallel.heads import CASES, ON_FOUR, compare_cases

Results = Callable[[int], dict[str, Any]]
OTHERS = ("shared keys", "an indexer that is not taught")


@pytest.fixture(scope="module")
def results(run_once: RunOnce) -> Results:
    """Return what a group of ranks has seen."""
    return lambda size: run_once(size, compare_cases)


@pytest.mark.parametrize(
    ("size", "case"), [(2, case) for case in (*CASES, *OTHERS)] + [(4, case) for case in (*ON_FOUR, *OTHERS)]
)
def test_logits_and_all_gradients_are_those_of_the_whole_model(results: Results, size: int, case: str) -> None:
    one, spread = results(size)[case]
    assert one.keys() == spread.keys()
    for name, want in one.items():
        torch.testing.assert_close(spread[name], want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("size", [2, 4])
def test_steps_with_clipped_gradients_are_those_of_the_whole_model(results: Results, size: int) -> None:
    one, spread = results(size)["steps"]
    assert (one["norms"] > 0.5).all()
    for name, want in one.items():
        torch.testing.assert_close(spread[name], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("index_heads", [None, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_greedy_continuation_is_that_of_the_whole_model(results: Results, size: int, index_heads: int | None) -> None:
    one, spread = results(size)[f"decoded, {index_heads}"]
    assert spread == one


def test_what_ranks_cannot_share_is_refused_by_name(results: Results) -> None:
    refused = results(2)["refused"]
    assert refused["heads"] == "mesh: expected a divisor of num_kv_heads=3, got 2 ranks"
    assert refused["dense"] == "layer: expected NativeSparseAttention, got DenseAttention"
    assert refused["again"] == "layer: expected one that has all of its heads, got one that is parallelized already"
    assert refused["mods"].startswith("score_mod: expected None of a layer whose heads are spread over ranks")
