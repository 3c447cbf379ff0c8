"""Ranks that make no step end in time, with a status of their own, and it is said who held them up."""

from __future__ import annotations

import pickle
import re
import signal
import time
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
from tests.parallel.processes import Group, started
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


def ended_in_time(group: Group, folder: Path) -> list[int | None]:
    """Return the statuses of processes that have ended in time, counted from their last step."""
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
    waits = r"rank 0 waits for it in \w+\.py:\d+, \w+ \(collective \d+, all_\w+ of \(\d+,\)\)"
    assert re.search(rf"step 2 has not ended in 2 s: {words}; {waits} \(stacks: ", said), said
    assert said.count("has not ended") == 1
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
    with started(2, tmp_path / "output", train, parallel, folder, "skip", checkpoint, 3 * SECONDS) as group:
        assert ended_in_time(group, folder) == [75, 75], group.output(0) + group.output(1)
        said = group.output(0) + group.output(1)
    skipped = r"all_reduce of \(1,\) in data_parallel\.py:\d+, totals on rank 0; [^;]*, \w+ on rank 1"
    assert re.search(rf"collective \d+ is not the same on all: {skipped}; rank 1 has skipped one", said), said


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
    trainer.loss = lambda batch, selection=None: (signal.raise_signal(signal.SIGUSR1), forward(batch, selection))[1]
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


def sighting(begun: int, **others: Any) -> Sighting:
    return Sighting(step=7, begun=begun, **{"moves": False, "place": "here", **others})


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


def test_a_rank_whose_process_has_ended_is_gone_and_who_was_told_so_lost_it() -> None:
    seen = [sighting(5, broke_off=True), None, sighting(5), None]
    assert describe_stall(seen, 60, gone=[1, 2]) == (
        "step 7 has broken off: rank 1 is gone; rank 3 does not answer; "
        "rank 0 lost them in here; rank 2 waits for them in here"
    )
    assert describe_stall([sighting(5, broke_off=True), sighting(5)], 60) == (
        "step 7 has broken off: rank 0 broke off in here; rank 1 is stuck in here"
    )


def test_the_collective_that_a_rank_waits_in_is_named_unless_it_has_ended() -> None:
    ended = Collective("0", 8, "sum", "there", True)
    seen = [
        sighting(5, recent=[ended, replace(ended, number=9, ended=False)]),
        sighting(4),
        sighting(5, recent=[ended]),
    ]
    assert describe_stall(seen, 60).endswith(
        "rank 0 waits for it in here (collective 9, sum); rank 2 waits for it in here"
    )


def test_a_flight_record_is_of_collectives_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {
            "process_group": ("0", "default"),
            "collective_seq_id": number,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[8, 3]],
            "time_created_ns": -number,
            "is_p2p": number == 2,
            **ended,
        }
        for number, ended in enumerate([{"state": "scheduled"}, {"state": "completed"}, {}, {"retired": True}])
    ]
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace", lambda: pickle.dumps({"entries": entries}), raising=False
    )
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.delattr("torch._C._distributed_c10d._dump_nccl_trace", raising=False)
    found = write_flight_record(tmp_path / "flight")
    assert [(x.number, x.ended) for x in found] == [(3, True), (1, True), (0, False)]
    assert {x.what for x in found} == {"all_reduce of (8, 3)"}
    assert pickle.loads((tmp_path / "flight").read_bytes()) == {"entries": entries}


def test_what_one_rank_scatters_is_one_collective_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for sizes in ([[2, 31]], []):
        entry = {"process_group": ("0", "default"), "collective_seq_id": 4, "time_created_ns": 0, "is_p2p": False}
        entry |= {"profiling_name": "gloo:scatter", "input_sizes": sizes, "output_sizes": [[31]]}
        written = pickle.dumps({"entries": [entry]})
        monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace", lambda: written, raising=False)  # noqa: B023
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.delattr("torch._C._distributed_c10d._dump_nccl_trace", raising=False)
        found.append(write_flight_record(tmp_path / "flight"))
    assert found[0] == found[1]
    assert found[0][0].what == "scatter of (31,)"


def collectives(*calls: str, first: int = 1) -> list[Collective]:
    """Return those that a word each stands for: what and, after a slash, where."""
    pairs = [call.partition("/") for call in calls]
    return [Collective("0", first + n, what, place, True) for n, (what, _, place) in enumerate(pairs)]


def test_ranks_that_begin_the_same_collectives_have_not_parted() -> None:
    both = collectives("sum/a", "max/b", "sum/a")
    assert describe_parting({0: both, 1: both[:1]}) == ""  # one of them has only not come so far
    assert describe_parting({0: both, 1: collectives("sum/other", "max/b", "sum/a")}) == ""  # of rank 0 alone
    assert describe_parting({}) == ""


def test_the_first_collective_that_differs_is_named_and_so_is_who_skipped_it() -> None:
    whole = collectives("sum/a", "max/b", "bucket/c", "sum/a", "max/b", "bucket/c")
    skips = collectives("sum/a", "bucket/c", "sum/a", "max/b", "bucket/c")
    assert describe_parting({0: whole, 1: skips, 2: whole}) == (
        "collective 2 is not the same on all: max in b on rank 0, 2; bucket in c on rank 1; rank 1 has skipped one"
    )


def test_a_skipped_collective_that_looks_like_the_next_is_found_by_where_it_was_called() -> None:
    whole = collectives("sum/a", "sum/b", "bucket/c", "sum/a", first=7)
    skips = collectives("sum/b", "bucket/c", "sum/a", first=7)
    assert describe_parting({0: skips, 1: whole}) == (
        "collective 7 is not the same on all: sum in b on rank 0; sum in a on rank 1; rank 0 has skipped one"
    )


def test_whose_collectives_are_others_altogether_has_skipped_none() -> None:
    said = describe_parting({0: collectives("sum", "sum"), 1: collectives("max", "max")})
    assert said == "collective 1 is not the same on all: sum on rank 0; max on rank 1"


def test_whoever_may_have_skipped_one_is_not_named_where_another_may_as_well() -> None:
    said = describe_parting({0: collectives("sum", "max", "sum"), 1: collectives("max", "sum", "max")})
    assert said == "collective 1 is not the same on all: sum on rank 0; max on rank 1"
