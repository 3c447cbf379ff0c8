"""Ranks that make no step end in time, with a status of their own, and it is said who held them up."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from flexnsa.cli import main
from flexnsa.diagnostics import stacks_on_request, watchdog
from flexnsa.diagnostics.stall import Sighting, describe_stall
from flexnsa.distributed import Ranks, joined_ranks
from flexnsa.training import Batch, Trainer, run
from tests.distributed.processes import Group, started
from tests.distributed.steps import CPU, make_trainer

SECONDS = 2.0
IN_TIME = 30.0
"""Seconds in which a group has ended: a watchdog's time, its pause, and room for a busy machine."""


def sleep_in_a_step() -> None:
    time.sleep(600)


def crawl_through_a_step() -> None:
    while True:
        _first_half()
        _second_half()


def _first_half() -> None:
    sum(range(20_000))


def _second_half() -> None:
    sum(range(20_000))


HOLDUPS = {"sleep": sleep_in_a_step, "crawl": crawl_through_a_step}


def train(parallel: str | None, folder: Path, holdup: str) -> None:
    """Have the last rank hold up its third step, whose rows it draws late."""
    with joined_ranks(parallel, CPU) as ranks:
        trainer = make_trainer(ranks)
        trainer.train_step()  # the first imports much, which takes its time on a busy machine
        if ranks.rank == ranks.world_size - 1:
            hold_up(trainer, holdup)
        run(trainer, folder, watchers=[watchdog(SECONDS)])


def hold_up(trainer: Trainer, holdup: str) -> None:
    rows = trainer.training_rows
    draw = rows.draw

    def draw_late(draws: random.Random, num_rows: int) -> Batch:
        if trainer.step == 2:
            HOLDUPS[holdup]()
        return draw(draws, num_rows)

    rows.draw = draw_late


def ended_in_time(group: Group, folder: Path) -> list[int | None]:
    """Give the statuses of processes that have ended in time, counted from their last step."""
    log = folder / "log.jsonl"
    group.wait_until(lambda: log.exists() and log.read_text().count("\n") >= 1)
    begun = time.monotonic()
    statuses = group.wait()
    assert time.monotonic() - begun < IN_TIME
    return statuses


@pytest.mark.parametrize(
    ("parallel", "holdup", "words"),
    [
        ("ddp", "sleep", r"rank 1 is stuck in test_watchdog\.py:\d+, sleep_in_a_step"),
        ("fsdp2", "crawl", r"rank 1 is slow: it is at work in test_watchdog\.py:\d+, \w+"),
    ],
)
def test_a_rank_that_holds_up_a_step_is_named_slow_or_stuck_and_so_is_who_waits(
    parallel: str, holdup: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with started(2, tmp_path / "output", train, parallel, folder, holdup) as group:
        assert ended_in_time(group, folder) == [75, 75], group.output(0) + group.output(1)
        said = group.output(0) + group.output(1)
    assert re.search(rf"step 2 has not ended in 2 s: {words}; rank 0 waits for it in \w+\.py:\d+, \w+", said), said
    assert said.count("has not ended") == 1
    for rank in range(2):
        stacks = (folder / f"stacks.rank-{rank}.txt").read_text()
        assert len(re.findall(r"^step 2, (before|after) a pause of 1 s", stacks, re.MULTILINE)) == 2
        assert (("sleep_in_a_step" in stacks) or ("crawl_through_a_step" in stacks)) == (rank == 1)
    assert not list(folder.glob("checkpoint*"))


def test_a_process_on_its_own_is_ended_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(1, tmp_path / "output", train, None, folder, "sleep") as group:
        assert ended_in_time(group, folder) == [75]
        assert "rank 0 is stuck in test_watchdog.py" in group.output(0)


def test_a_run_that_makes_steps_is_left_alone_and_leaves_no_file(tmp_path: Path) -> None:
    trainer = make_trainer(Ranks())
    (tmp_path / "stall.rank-0.json").write_text("of an earlier start")
    assert run(trainer, tmp_path, watchers=[stacks_on_request, watchdog(600)]) is None
    assert trainer.step == trainer.config.steps
    assert not list(tmp_path.glob("stall*"))
    assert not list(tmp_path.glob("stacks*"))


def test_a_signal_writes_the_stacks_at_any_time(tmp_path: Path) -> None:
    trainer = make_trainer(Ranks())
    forward = trainer.loss
    trainer.loss = lambda batch: (signal.raise_signal(signal.SIGUSR1), forward(batch))[1]
    assert run(trainer, tmp_path, watchers=[stacks_on_request]) is None
    stacks = (tmp_path / "stacks.rank-0.txt").read_text()
    assert stacks.count("test_watchdog.py") > trainer.config.steps
    assert "in train_step" in stacks


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_named(seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "--out", str(tmp_path / "run"), "--watchdog", seconds])
    assert left.value.code == 2
    assert "argument --watchdog: expected seconds, more than 0 and at most" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def sighting(collectives: int, *, moves: bool = False) -> Sighting:
    return Sighting(step=7, collectives=collectives, moves=moves, place="here")


def test_who_has_begun_fewer_collectives_is_waited_for() -> None:
    seen = [sighting(5), sighting(4), sighting(5), sighting(3, moves=True)]
    assert describe_stall(seen, 60) == (
        "step 7 has not ended in 60 s: rank 1 is stuck in here; rank 3 is slow: it is at work in here; "
        "rank 0 waits for them in here; rank 2 waits for them in here"
    )


def test_who_does_not_answer_is_waited_for() -> None:
    assert describe_stall([sighting(5), None], 60) == (
        "step 7 has not ended in 60 s: rank 1 does not answer; rank 0 waits for it in here"
    )


def test_ranks_that_are_all_in_the_same_place_wait_for_nobody() -> None:
    assert describe_stall([sighting(5), sighting(5, moves=True)], 60) == (
        "step 7 has not ended in 60 s: rank 0 is stuck in here; rank 1 is slow: it is at work in here"
    )
