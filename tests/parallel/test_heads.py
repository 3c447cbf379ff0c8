"""Heads of attention, and the head of a model, that are spread over ranks compute what they do on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.testing import assert_close

from tests.parallel.conftest import RunOnce
from tests.parallel.heads import CASES, CHUNKS, ON_FOUR, WAYS, compare_cases, compare_heads

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
    torch.testing.assert_close(spread, one, rtol=0, atol=1e-5)


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


HeadResults = dict[tuple[str, ...], Any]


@pytest.fixture(scope="module")
def head_results(run_once: RunOnce) -> HeadResults:
    """What two ranks have seen, by hook, number of chunks and way."""
    return cast("HeadResults", run_once(2, compare_heads))


@pytest.mark.parametrize("hook", ["plain", "capped"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_one_process(
    way: str, chunks: str, hook: str, head_results: HeadResults
) -> None:
    got, want = head_results[hook, chunks, way], head_results[hook,]
    assert got.keys() == want.keys()
    assert_close(got, want)


def test_the_hook_is_one_that_the_loss_depends_on(head_results: HeadResults) -> None:
    assert abs(head_results["capped",]["loss"] - head_results["plain",]["loss"]) > 0.1
