"""A killed run goes on from torchtitan's own distributed checkpoints, on any number of ranks, with the same losses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.integrations.torchtitan.interrupted import SAVED, go_on, grow, run_through, start
from tests.integrations.torchtitan.runs import LOSS, SELECTION_LOSS, TOLD
from tests.parallel.conftest import RunOnce
from tests.parallel.processes import run_together, started


def test_a_killed_run_goes_on_with_the_same_losses(run_once: RunOnce, tmp_path: Path) -> None:
    with started(2, tmp_path / "killed", start, tmp_path / "killed") as group:
        assert group.wait() == [-signal.SIGKILL] * 2
    through = run_once(2, run_through)
    assert len(through[LOSS]) == 4
    for ranks in (4, 1):
        file = tmp_path / f"resumed-{ranks}" / "results.pt"
        run_together(ranks, file.parent, go_on, file, ranks, tmp_path / "killed" / "checkpoint")
        resumed = torch.load(file)
        assert resumed[LOSS] == pytest.approx(through[LOSS][SAVED:], rel=1e-5)
        assert resumed[SELECTION_LOSS] == pytest.approx(through[SELECTION_LOSS][SAVED:], rel=1e-4)


def test_a_start_with_longer_rows_goes_on(run_once: RunOnce) -> None:
    told = {name: stage[TOLD] for name, stage in run_once(1, grow).items()}
    assert told == {"first": [[1, 4], [2, 4]], "second": [[3, 2], [4, 2]]}
