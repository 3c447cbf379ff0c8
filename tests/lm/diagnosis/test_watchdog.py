"""Ranks that make no step end in time, with a status of their own, and it is said who held them up."""

from __future__ import annotations

import pickle
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flexnsa import SelectionLoss
from flexnsa.lm import Batch, Trainer, run
from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis import stacks_on_request, watchdog
from flexnsa.lm.diagnosis.hang_report import Collective, Sighting, describe_parting, describe_stall, write_flight_record
from flexnsa.lm.parallel import Ranks, joined_ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, save_checkpoint
from tests.parallel.processes import started
from tests.parallel.steps import CPU, make_trainer

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


def train(parallel: str | None, folder: Path, holdup: str, checkpoint: str = "none", seconds: float = SECONDS) -> None:
    """Have the last rank hold up its third step, whose rows it draws late, or skip a collective at its end.

    A checkpoint is none, or written between the steps, or read before the first of the run.
    """
    with joined_ranks(parallel, CPU) as ranks:
        trainer = make_trainer(ranks, checkpoint_every=2 if checkpoint == "written" else 100)
        trainer.train_step()  # the first imports much, which takes its time on a busy machine
        if checkpoint == "read":
            ranks.on_first(folder.mkdir)
            save_checkpoint(checkpoint_path(folder, trainer), trainer)
        if ranks.rank == ranks.world_size - 1:
            if holdup == "skip":
                skip_a_sum(trainer)
            else:
                hold_up(trainer, holdup)
        run(trainer, folder, watchers=[watchdog(seconds)])


def hold_up(trainer: Trainer, holdup: str) -> None:
    loss = trainer.loss

    def late_loss(batch: Batch, selection: SelectionLoss | None = None) -> Tensor:
        if trainer.step == 2:
            HOLDUPS[holdup]()
        return loss(batch, selection)

    trainer.loss = late_loss


def skip_a_sum(trainer: Trainer) -> None:
    ranks = trainer.ranks
    totals = ranks.totals
    ranks.totals = lambda values: values if trainer.step == 2 else totals(values)


def output_of_a_stall(size: int, parallel: str | None, folder: Path, *options: Any) -> str:
    """Return what ranks have printed that end in time, counted from their last step, and with the status of a stall."""
    log = folder / "log.jsonl"
    with started(size, folder.parent / "output", train, parallel, folder, *options) as group:
        group.wait_until(lambda: log.exists() and log.read_text().count("\n") >= 1)
        begun = time.monotonic()
        assert group.wait() == [75] * size, group.outputs()
        assert time.monotonic() - begun < IN_TIME
        return "".join(map(group.output, range(size)))


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
    output = output_of_a_stall(2, parallel, folder, holdup)
    waits = r"rank 0 waits for it in \w+\.py:\d+, \w+ \(collective \d+, all_\w+ of \(\d+,\)\)"
    assert re.search(rf"step 2 has not ended in 2 s: {words}; {waits} \(stacks: ", output), output
    assert output.count("has not ended") == 1
    for rank in range(2):
        stacks = (folder / f"stacks.rank-{rank}.txt").read_text()
        assert pickle.loads((folder / f"flight.rank-{rank}").read_bytes())["entries"]
        assert len(re.findall(r"^step 2, (before|after) a pause of 1 s", stacks, re.MULTILINE)) == 2
        assert (("sleep_in_a_step" in stacks) or ("crawl_through_a_step" in stacks)) == (rank == 1)
    assert not list(folder.glob("checkpoint*"))


@pytest.mark.parametrize(
    ("parallel", "checkpoint"), [("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "written"), ("fsdp2", "read")]
)
def test_a_rank_that_skips_a_collective_is_named_with_the_collective(
    parallel: str, checkpoint: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    output = output_of_a_stall(2, parallel, folder, "skip", checkpoint, 3 * SECONDS)
    skipped = r"all_reduce of \(1,\) in data_parallel\.py:\d+, totals on rank 0; [^;]*, \w+ on rank 1"
    assert re.search(rf"collective \d+ is not the same on all: {skipped}; rank 1 has skipped one", output), output


def test_a_process_on_its_own_is_ended_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert "rank 0 is stuck in test_watchdog.py" in output_of_a_stall(1, None, folder, "sleep")


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
    trainer.loss = lambda batch, selection=None: (signal.raise_signal(signal.SIGUSR1), forward(batch, selection))[1]
    assert run(trainer, tmp_path, watchers=[stacks_on_request]) is None
    stacks = (tmp_path / "stacks.rank-0.txt").read_text()
    assert stacks.count("test_watchdog.py") > trainer.config.steps
    assert "in train_step" in stacks


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_named(seconds: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    said = refused(main, ["train", "--out", str(tmp_path / "run"), "--watchdog", seconds])
    assert "argument --watchdog: expected seconds, more than 0 and at most" in said
    assert not (tmp_path / "run").exists()


def sighting(begun: int, **fields: Any) -> Sighting:
    return Sighting(step=7, begun=begun, **{"moves": False, "place": "here", **fields})


ENDED = Collective("0", 8, "sum", "there", True)
STALLS: dict[str, tuple[list[Sighting | None], str]] = {
    "ranks wait for those that have begun fewer collectives": (
        [sighting(5), sighting(4), sighting(5), sighting(3, moves=True)],
        "has not ended in 60 s: rank 1 is stuck in here; rank 3 is slow: it is at work in here; "
        "rank 0 waits for them in here; rank 2 waits for them in here",
    ),
    "a rank that does not answer is waited for": (
        [None, sighting(5)],
        "has not ended in 60 s: rank 0 does not answer; rank 1 waits for it in here",
    ),
    "ranks in the same place wait for none": (
        [sighting(5), sighting(5, moves=True)],
        "has not ended in 60 s: rank 0 is stuck in here; rank 1 is slow: it is at work in here",
    ),
    "a rank whose process has ended is gone, and the connection to it lost": (
        [sighting(5, broke_off=True), None, sighting(5), None],
        "has broken off: rank 1 is gone; rank 3 does not answer; "
        "rank 0 lost them in here; rank 2 waits for them in here",
    ),
    "a connection is lost, and no rank gone": (
        [sighting(5, broke_off=True), sighting(5)],
        "has broken off: rank 0 broke off in here; rank 1 is stuck in here",
    ),
    "the collective that a rank waits in is named unless it has ended": (
        [sighting(5, recent=[ENDED, replace(ENDED, number=9, ended=False)]), sighting(4), sighting(5, recent=[ENDED])],
        "has not ended in 60 s: rank 1 is stuck in here; rank 0 waits for it in here (collective 9, sum); "
        "rank 2 waits for it in here",
    ),
}


@pytest.mark.parametrize("stall", STALLS)
def test_a_stall_is_described(stall: str) -> None:
    seen, words = STALLS[stall]
    assert describe_stall(seen, 60, gone=[1, 2]) == f"step 7 {words}"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any]]], list[Collective]]:
    """Return a function that writes the flight record of some entries, and returns its collectives."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.delattr("torch._C._distributed_c10d._dump_nccl_trace", raising=False)

    def write(entries: list[dict[str, Any]]) -> list[Collective]:
        shared = {"process_group": ("0", "default"), "time_created_ns": 0, "is_p2p": False}
        record = pickle.dumps({"entries": [shared | entry for entry in entries]})
        monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace", lambda: record, raising=False)
        collectives = write_flight_record(tmp_path / "flight")
        assert (tmp_path / "flight").read_bytes() == record
        return collectives

    return write


def test_a_flight_record_is_of_collectives_in_their_order(recorded: Callable[..., list[Collective]]) -> None:
    sums = {"profiling_name": "gloo:all_reduce", "input_sizes": [[8, 3]]}
    states = [{"state": "scheduled"}, {"state": "completed"}, {"is_p2p": True}, {"retired": True}]
    collectives = recorded(
        [{**sums, "collective_seq_id": at, "time_created_ns": -at, **state} for at, state in enumerate(states)]
    )
    assert [(x.number, x.ended) for x in collectives] == [(3, True), (1, True), (0, False)]
    assert {x.what for x in collectives} == {"all_reduce of (8, 3)"}


def test_what_one_rank_scatters_is_one_collective_on_all(recorded: Callable[..., list[Collective]]) -> None:
    scatter = {"profiling_name": "gloo:scatter", "collective_seq_id": 4, "output_sizes": [[31]]}
    first, second = (recorded([scatter | {"input_sizes": sizes}]) for sizes in ([[2, 31]], []))
    assert first == second
    assert first[0].what == "scatter of (31,)"


COLLECTIVES: dict[str, tuple[list[str], str]] = {
    "a rank has only not come so far": (["sum/a max/b sum/a", "sum/a"], ""),
    "a rank calls the same from elsewhere": (["sum/a max/b sum/a", "sum/other max/b sum/a"], ""),
    "there are no ranks": ([], ""),
    "a rank has skipped one": (
        ["sum/a max/b bucket/c sum/a max/b", "sum/a bucket/c sum/a max/b", "sum/a max/b bucket/c sum/a max/b"],
        "collective 2 is not the same on all: max in b on rank 0, 2; bucket in c on rank 1; rank 1 has skipped one",
    ),
    "a rank has skipped one that looks like the next": (
        ["sum/b bucket/c sum/a", "sum/a sum/b bucket/c sum/a"],
        "collective 1 is not the same on all: sum in b on rank 0; sum in a on rank 1; rank 0 has skipped one",
    ),
    "collectives are altogether different": (
        ["sum sum", "max max"],
        "collective 1 is not the same on all: sum on rank 0; max on rank 1",
    ),
    "either rank may have skipped one": (
        ["sum max sum", "max sum max"],
        "collective 1 is not the same on all: sum on rank 0; max on rank 1",
    ),
}
"""For each rank its calls, such as ``sum/a``: what it does and where."""


@pytest.mark.parametrize("case", COLLECTIVES)
def test_the_first_collective_that_differs_is_named(case: str) -> None:
    calls, words = COLLECTIVES[case]
    recent = {}
    for rank, line in enumerate(calls):
        pairs = [call.partition("/") for call in line.split()]
        recent[rank] = [Collective("0", at, what, place, True) for at, (what, _, place) in enumerate(pairs, 1)]
    assert describe_parting(recent) == words
