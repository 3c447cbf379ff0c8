"""However a head is spread over ranks, the loss and its gradients are those of the whole model."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch.testing import assert_close

from tests.parallel.conftest import RunOnce
from tests.parallel.spread_head import CHUNKS, WAYS, compare_heads

Results = dict[tuple[str, ...], Any]


@pytest.fixture(scope="module")
def results(run_once: RunOnce) -> Results:
    """What two ranks have seen, by hook, number of chunks and way."""
    return cast("Results", run_once(2, compare_heads))


@pytest.mark.parametrize("hook", ["plain", "capped"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_one_process(way: str, chunks: str, hook: str, results: Results) -> None:
    got, want = results[hook, chunks, way], results[hook,]
    assert got.keys() == want.keys()
    assert_close(got, want)


def test_the_hook_is_one_that_the_loss_depends_on(results: Results) -> None:
    assert abs(results["capped",]["loss"] - results["plain",]["loss"]) > 0.1
