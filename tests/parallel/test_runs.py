"""Runs of several processes that are killed, stopped and started again, on as many processes or on others."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from flexnsa.lm.checkpoint.lock import locked
from flexnsa.lm.cli import main
from flexnsa.lm.diagnosis.watchdog import STALLED
from tests.lm.training.runs import curve
from tests.parallel.processes import LIMIT, Group, run_together, started

STEPS = 60
OPTIONS = (
    "--pack --device cpu --dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 4 "
    f"--seq-len 32 --warmup-steps 4 --steps {STEPS} --eval-every 15 --eval-sequences 4 --checkpoint-every 8"
).split()
SECONDS = 20
"""Of the watchdog."""


def train(*options: str) -> None:
    main(["train", *OPTIONS, *options])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text("".join(f"def f{n}(x):\n    return x * {n}\n{'#' * (n % 23)}\n\n" for n in range(300)))
    return file


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_killed_and_stopped_at_any_moment_it_goes_on_to_the_same_curve_bit_for_bit(
    text: Path, tmp_path: Path, parallel: str
) -> None:
    def ranks(folder: str, function: Callable[..., None] = train) -> AbstractContextManager[Group]:
        options = ("--parallel", parallel, "--text", str(text), "--out", str(tmp_path / folder))
        return started(2, tmp_path / "output", function, *options)

    with ranks("whole") as group:
        assert group.wait() == [0, 0], group.output(0)
    whole, folder = curve(tmp_path / "whole"), tmp_path / "killed"
    assert len(whole) == STEPS
    draws = random.Random(parallel)

    for victims in draws.sample([{0}, {1}, {0, 1}], 3):
        come_to = len(curve(folder)) + draws.randint(1, 3)  # further than before: it runs, and is watched
        with ranks("killed", train_watched) as group:
            group.wait_until(lambda: len(curve(folder)) >= come_to)  # noqa: B023
            time.sleep(draws.uniform(0, 0.03))
            for rank in victims:
                group.processes[rank].kill()
            killed = time.monotonic()
            statuses = group.wait()
            assert time.monotonic() - killed < SECONDS
            for rank in {0, 1} - victims:
                assert statuses[rank] == STALLED, group.output(rank)  # it does not wait for ever
                assert f"has broken off: rank {1 - rank} is gone; rank {rank} lost it in" in group.output(rank)
    with ranks("killed", _train_until_rank_0_has_written_half_a_checkpoint) as group:
        assert group.wait() == [-signal.SIGKILL, 1], group.output(1)
    assert list(folder.glob("checkpoint*.tmp"))
    before = curve(folder)
    assert before == whole[: len(before)]
    with ranks("killed") as group:  # a polite word to one of them
        group.wait_until(lambda: len(curve(folder)) > len(before) + 1)
        os.kill(group.processes[1].pid or 0, signal.SIGTERM)
        assert group.wait() == [128 + signal.SIGTERM] * 2
        stopped = len(curve(folder))
        assert len(before) < stopped < STEPS
    with ranks("killed") as group:
        assert group.wait() == [0, 0], group.output(0)
    assert curve(folder) == whole
    assert f" {stopped}/{STEPS} " in group.output(0)  # nothing was done twice


def train_watched(*options: str) -> None:
    train(*options, "--watchdog", str(SECONDS))


def _train_until_rank_0_has_written_half_a_checkpoint(*options: str) -> None:
    if os.environ["RANK"] == "0":
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    train(*options)


def test_other_numbers_of_processes_and_other_ways_go_on_to_the_same_curve(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--text", str(text), "--out")
    train(*options, str(tmp_path / "whole"))
    whole, folder = curve(tmp_path / "whole"), tmp_path / "run"
    for size, parallel, steps in ((2, "fsdp2", 4), (4, "fsdp2", 8), (2, "ddp", 12)):
        with started(size, tmp_path / "output", train, *options, str(folder), "--parallel", parallel) as group:
            group.wait_until(lambda: len(curve(folder)) >= steps)  # noqa: B023
            for process in group.processes:
                os.kill(process.pid or 0, signal.SIGTERM)
            assert group.wait() == [128 + signal.SIGTERM] * size
    monkeypatch.setattr(sys, "stderr", (tmp_path / "stderr").open("w"))
    train(*options, str(folder))
    resumed = curve(folder)
    assert [record["step"] for record in resumed] == list(range(STEPS))
    for one, other in zip(resumed, whole, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    main(["generate", "--checkpoint", str(folder), "--prompt", "def", "--max-new-tokens", "2", "--device", "cpu"])


def test_processes_that_share_tokens_take_the_curve_of_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "--window-size 4 --compress-block-size 8 --compress-stride 4 --select-block-size 8"
    options = (*sizes.split(), "--text", str(text), "--out")
    monkeypatch.setattr(sys, "stderr", (tmp_path / "stderr").open("w"))
    train(*options, str(tmp_path / "whole"), "--steps", "12")
    spread = ("--parallel", "fsdp2", "--context-parallel", "2")
    run_together(2, tmp_path / "output", train, *options, str(tmp_path / "run"), *spread, "--steps", "12")
    for one, other in zip(curve(tmp_path / "run"), curve(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_torchrun_starts_it_and_hands_on_a_signal_to_end(text: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "flexnsa", "train", *OPTIONS, "--text", str(text), "--out", str(folder)]
    command += ["--steps", "100000", "--parallel", "fsdp2", "--log-ranks"]
    with output.open("w") as file:
        torchrun = subprocess.Popen([*launcher, *command], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + LIMIT
        while len(curve(folder)) < 3:
            assert torchrun.poll() is None, output.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGTERM)
        torchrun.wait(LIMIT)
    finally:
        torchrun.kill()
    steps = len(curve(folder))
    assert [path.name for path in folder.glob("checkpoint*")] == [f"checkpoint-{steps}.dcp"]
    assert curve(folder, "log.rank-1.jsonl") == curve(folder)
    assert output.read_text().count("bytes to train on") == 1  # rank 0 speaks


def test_all_ranks_of_a_second_run_in_a_folder_are_told_of_the_first(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    options = ("--parallel", "ddp", "--text", str(text), "--out", str(folder))
    with locked(folder):
        outputs = run_together(2, tmp_path / "output", train, *options, status=2)
    assert all(f"{folder}: process {os.getpid()} is training here" in output for output in outputs)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("done", [0, 2])
def test_ranks_that_see_different_disks_are_told(text: Path, tmp_path: Path, parallel: str, done: int) -> None:
    if done:
        run_together(1, tmp_path / "output", train, "--text", str(text), "--out", str(tmp_path / "0"), "--steps", "2")
    arguments = (_train_in_a_folder_of_its_own, str(text), tmp_path, parallel)
    outputs = run_together(2, tmp_path / "output", *arguments, status=2)
    assert f"{tmp_path / '1'}: not the same folder on rank 1 as on rank 0; take" in outputs[1]
    assert all("--out" in output for output in outputs)


def _train_in_a_folder_of_its_own(text: str, folder: Path, parallel: str) -> None:
    local = folder / os.environ["RANK"]
    local.mkdir(exist_ok=True)
    train("--parallel", parallel, "--text", text, "--out", str(local), "--steps", "2")


WRONG: dict[str, tuple[str, dict[str, str], str]] = {
    "not started by torchrun": ("--parallel ddp", {"RANK": ""}, "--parallel: expected a start by torchrun, which sets"),
    "uneven batch": ("--parallel ddp --batch-size 5", {}, r"--batch-size: expected batch_size \* grad_accumulation to"),
    "uneven evaluation": ("--parallel fsdp2 --eval-sequences 3", {}, "--eval-sequences: expected eval_sequences to be"),
    "no such way": ("--parallel dp", {}, "--parallel: invalid choice: 'dp'"),
    "half precision": ("--parallel ddp --reduce-dtype fp16", {}, "--reduce-dtype: invalid choice: 'fp16'"),
    "sum of one": ("--reduce-dtype bf16", {}, "--reduce-dtype: expected --parallel with it"),
    "logs of one": ("--log-ranks", {}, "--log-ranks: expected --parallel with it"),
    "no divisor": ("--parallel fsdp2 --context-parallel 3", {}, "--context-parallel: expected a divisor of the 2"),
    "tokens of one": ("--context-parallel 2", {}, "--context-parallel: expected --parallel with it"),
    "short chunks": (
        "--parallel fsdp2 --context-parallel 2",
        {},
        "--seq-len: expected 4 chunks of at least 63 tokens, in multiples of compress_stride=8, got 32 tokens",
    ),
    "looks at rows": (
        "--parallel ddp --context-parallel 2 --strict",
        {},
        "--strict: expected no --context-parallel with it",
    ),
    "no backward": ("--parallel ddp --impl flex", {}, "--impl: expected 'auto' or 'sdpa' to train on a CPU"),
    "short text": ("--parallel ddp --seq-len 100000", {}, "--seq-len: expected less than the"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_before_processes_wait_for_each_other(
    case: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, variables, message = WRONG[case]
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in (torchrun | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.init_process_group", _must_not_run)
    monkeypatch.setattr("flexnsa.lm.parallel.joining.REFUSAL_SECONDS", 0.1)  # nobody else will come
    with pytest.raises(SystemExit) as left:
        train("--text", str(text), "--out", str(tmp_path / "run"), *options.split())
    assert left.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def _must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError("a process group was made")
