"""A case ends in time however its processes end, and its folder names the rank that failed first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexnsa.files import write_whole
from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.diagnosis import run_case
from flexnsa.lm.parallel import joined_ranks
from tests.parallel.steps import CPU


def sum_on_all(last_does: str) -> dict[str, Any]:
    """Wait for the last rank, which does something else."""
    with joined_ranks("ddp", CPU) as ranks:
        print("rank", ranks.rank, "of", ranks.world_size)
        if ranks.rank == 1:
            act(last_does)
        ones = torch.ones(())
        dist.all_reduce(ones)
        return {"sum": ones.item(), "port": os.environ["MASTER_PORT"]}


def act(what: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("no such\n   file")
    if what == "leave":
        raise SystemExit(3)
    if what == "sleep":
        time.sleep(600)


def test_the_values_of_rank_0_are_returned_and_all_output_is_in_files(tmp_path: Path) -> None:
    (tmp_path / "stacks.rank-7.txt").write_text("of an earlier case")
    outcome = run_case(tmp_path, sum_on_all, "nothing", ranks=2, seconds=60)
    assert outcome.passed, outcome.reason
    assert outcome.values["sum"] == 2
    assert [(tmp_path / f"log.rank-{rank}.txt").read_text() for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]
    files = {LOCK_NAME, "environment.json", "log.rank-0.txt", "log.rank-1.txt"}
    assert {file.name for file in tmp_path.iterdir()} == files
    assert "MASTER_PORT" not in os.environ


@pytest.mark.parametrize(
    ("last_does", "reason"),
    [
        ("die", "rank 1: died of SIGKILL"),
        ("raise", "rank 1: ValueError: no such file (test_cases.py:"),
        ("leave", "rank 1: SystemExit: 3 (test_cases.py:"),
    ],
)
def test_who_failed_is_named_and_not_who_waited_for_it(last_does: str, reason: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    outcome = run_case(tmp_path, sum_on_all, last_does, ranks=2, seconds=60)
    assert outcome.status == "failed"
    assert outcome.reason.startswith(reason)
    assert ("ValueError: no such" in (tmp_path / "log.rank-1.txt").read_text()) == (last_does == "raise")
    assert time.monotonic() - begun < 30


def test_where_each_rank_stood_is_told_when_the_time_is_over(tmp_path: Path) -> None:
    outcome = run_case(tmp_path, sum_on_all, "sleep", ranks=2, seconds=4)
    assert outcome.status == "over time"
    first, second = outcome.reason.split("; ")
    assert first.startswith("after 4 s rank 0 in distributed_c10d.py:")
    assert second.startswith("rank 1 in test_cases.py:")
    assert second.endswith(", act")
    assert "sum_on_all" in (tmp_path / "stacks.rank-1.txt").read_text()


def sleep_by_number(file: str) -> dict[str, Any]:
    write_whole(Path(file), str(os.getpid()))
    time.sleep(600)
    return {}


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_leave_after_who_started_them_was_killed_and_at_no_interrupt(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal: a rank that ended then would be reported as failed."""
    file = tmp_path / "number"
    arguments = (tmp_path / "case", sleep_by_number, str(file))
    options: dict[str, Any] = {"target": run_case, "args": arguments, "kwargs": {"seconds": 600}}
    starter = multiprocessing.get_context("forkserver").Process(**options)
    starter.start()
    wait_until(file.exists)
    rank = int(file.read_text())
    os.kill(rank, signal.SIGINT)
    time.sleep(0.2)
    assert is_there(rank)
    starter.kill()
    starter.join()
    wait_until(lambda: not is_there(rank))
    assert not (tmp_path / "case" / "log.rank-0.txt").read_text()


def test_an_interrupt_ends_the_ranks_of_who_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "number"

    def interrupted(*_: object) -> list[Any]:
        wait_until(file.exists)
        raise KeyboardInterrupt

    monkeypatch.setattr("flexnsa.lm.measure.process.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_case(tmp_path / "case", sleep_by_number, str(file), seconds=600)
    assert not is_there(int(file.read_text()))
