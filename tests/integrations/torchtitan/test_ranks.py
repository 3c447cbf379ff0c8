"""However many ranks share a run, however its layers run, and if it is killed: it takes the steps of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.integrations.torchtitan import scenarios
from tests.integrations.torchtitan.runs import LOSS, NORM, SELECTION_LOSS, TOLD
from tests.parallel.conftest import RunOnce
from tests.parallel.processes import run_together, started

TOLERANCES = {LOSS: 1e-5, NORM: 1e-4, SELECTION_LOSS: 1e-4}
"""Relative ones. A divergence is a small difference of logarithms, and AdamW makes steps of rounding errors."""
FIRST_STEPS = 4
"""Steps in which the other metrics are compared: later they have the rounding errors of all steps before."""


@pytest.mark.parametrize("name", scenarios.SAME)
def test_a_shared_run_takes_the_steps_of_one_process(name: str, run_once: RunOnce) -> None:
    scenario = scenarios.SAME[name]
    if scenario.apart:
        shared = run_once(scenario.ranks, scenarios.run_apart, name)
    else:
        shared = run_once(scenario.ranks, scenarios.run_shared, scenario.ranks)[name]
    alone = run_once(1, scenarios.run_alone, scenario.like)
    steps = len(shared[LOSS])
    assert steps >= 4
    assert shared[TOLD] == [[step, 4] for step in range(1, steps + 1)]
    for metric, tolerance in TOLERANCES.items():
        count = steps if metric == LOSS else FIRST_STEPS
        assert shared[metric][:count] == pytest.approx(alone[metric][:count], rel=tolerance), metric


@pytest.mark.parametrize("name", scenarios.ALONE)
def test_both_losses_are_logged_and_fall(name: str, run_once: RunOnce) -> None:
    run = run_once(1, scenarios.run_alone, name)
    assert run[LOSS][-1] < run[LOSS][0]
    assert all(loss > 0 for loss in run[SELECTION_LOSS])


def test_a_killed_run_goes_on_with_the_same_losses(run_once: RunOnce, tmp_path: Path) -> None:
    with started(2, tmp_path / "killed", scenarios.start, tmp_path / "killed") as group:
        assert group.wait() == [-signal.SIGKILL] * 2
    through = run_once(2, scenarios.run_through)
    assert len(through[LOSS]) == 4
    for ranks in (4, 1):
        file = tmp_path / f"resumed-{ranks}" / "results.pt"
        run_together(ranks, file.parent, scenarios.go_on, file, ranks, tmp_path / "killed" / "checkpoint")
        resumed = torch.load(file)
        assert resumed[LOSS] == pytest.approx(through[LOSS][scenarios.SAVED :], rel=1e-5)
        assert resumed[SELECTION_LOSS] == pytest.approx(through[SELECTION_LOSS][scenarios.SAVED :], rel=1e-4)


def test_a_start_with_longer_rows_goes_on(run_once: RunOnce) -> None:
    told = {name: stage[TOLD] for name, stage in run_once(1, scenarios.grow).items()}
    assert told == {"first": [[1, 4], [2, 4]], "second": [[3, 2], [4, 2]]}


def test_indexers_warm_up_alone_and_go_on_with_all_others(run_once: RunOnce) -> None:
    moved = run_once(2, scenarios.teach)
    assert moved["warm-up"] == {name for name in moved["all"] if ".indexer." in name}
    assert moved["joint"] == moved["all"]
    assert moved["losses"][0] == pytest.approx(moved["losses"][1], rel=TOLERANCES[LOSS])
