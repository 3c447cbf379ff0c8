"""A run resumes with another number of steps, by the schedule of the new number."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexnsa.files import FileError
from flexnsa.lm import DecoderConfig, TrainConfig, Trainer, Watcher, run
from flexnsa.lm.cli import main
from flexnsa.lm.training.checkpoint import newest_checkpoint, read_checkpoint
from tests.lm.training.runs import curve, train, trainer_of
from tests.parallel.processes import run_together
from tests.support.inputs import TINY

MODEL = DecoderConfig(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, nsa=TINY)
BEGUN = TrainConfig(
    steps=8, batch_size=2, seq_len=40, warmup_steps=2, eval_every=5, eval_sequences=4, checkpoint_every=3
)
LONGER = replace(BEGUN, steps=12)


class Killed(BaseException):
    """What ends a run without a word."""


def after(step: int, act: Callable[[], object]) -> Watcher:
    """Act when a step has ended."""

    @contextmanager
    def watch(trainer: Trainer, _folder: Path) -> Iterator[Callable[[], object]]:
        yield lambda: act() if trainer.step == step else None

    return watch


def kill() -> None:
    raise Killed


def stop() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def begun(text_folder: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Return a folder of a name in which so many steps of eight are done."""

    def begin(name: str, done: int) -> Path:
        run(trainer_of(text_folder, MODEL, BEGUN), tmp_path / name, watchers=[after(done, stop)])
        return tmp_path / name

    return begin


@pytest.mark.parametrize("done", [1, 5, 8])
def test_more_steps_follow_the_schedule_of_their_number_and_keep_what_is_done(
    text_folder: Path, begun: Callable[[str, int], Path], done: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun("run", done)
    before = curve(folder)
    capsys.readouterr()
    run(trainer_of(text_folder, MODEL, LONGER), folder)
    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if "goes on" in line]
    rate = f"{LONGER.learning_rate(done):.3g}"
    assert line.endswith(f"step {done} goes on by the schedule of 12 steps in place of 8: its learning rate is {rate}")
    assert curve(folder)[:done] == before[:done]
    rates = [record["lr"] for record in curve(folder)]
    assert rates == [*map(BEGUN.learning_rate, range(done)), *map(LONGER.learning_rate, range(done, 12))]
    header, _ = read_checkpoint(newest_checkpoint(folder) or folder)
    assert (header["step"], header["training"]["steps"]) == (12, 12)
    run(trainer_of(text_folder, MODEL, LONGER), folder)
    assert "goes on" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(("done", "at", "end"), [(5, 1, kill), (5, 3, stop), (8, 1, stop), (8, 3, kill)])
def test_they_are_the_same_bit_for_bit_wherever_they_are_interrupted(
    text_folder: Path, begun: Callable[[str, int], Path], done: int, at: int, end: Callable[[], None]
) -> None:
    whole, interrupted = begun("whole", done), begun("interrupted", done)
    run(trainer_of(text_folder, MODEL, LONGER), whole)
    with suppress(Killed):
        run(trainer_of(text_folder, MODEL, LONGER), interrupted, watchers=[after(done + at, end)])
    assert len(curve(interrupted)) == done + at
    last = trainer_of(text_folder, MODEL, LONGER)
    run(last, interrupted)
    assert curve(interrupted) == curve(whole)
    _, expected = read_checkpoint(newest_checkpoint(whole) or whole)
    for name, parameter in last.model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])


@pytest.mark.parametrize("steps", [5, 6])
def test_fewer_steps_than_were_planned_are_taken_if_they_are_not_fewer_than_are_done(
    text_folder: Path, begun: Callable[[str, int], Path], steps: int
) -> None:
    folder = begun("run", 5)
    run(trainer_of(text_folder, MODEL, replace(BEGUN, steps=steps)), folder)
    assert len(curve(folder)) == steps
    run(trainer_of(text_folder, MODEL, BEGUN), folder)  # and the others after that
    assert [record["step"] for record in curve(folder)] == list(range(8))


@pytest.mark.parametrize("done", [5, 8])
def test_fewer_steps_than_are_done_are_refused_and_change_nothing(
    text_folder: Path, begun: Callable[[str, int], Path], done: int
) -> None:
    folder = begun("run", done)
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}
    trainer = trainer_of(text_folder, MODEL, replace(BEGUN, steps=done - 1))
    with pytest.raises(FileError, match=rf"^steps: expected at least {done}, as many as .* has done, got {done - 1}$"):
        run(trainer, folder)
    assert trainer.step == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name in contents} == contents


def test_the_command_goes_on_and_its_run_is_read_as_any_other(
    text_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in ("2", "5"):
        _train(text_folder, tmp_path / "run", "--steps", steps)
    assert "step 2 goes on by the schedule of 5 steps in place of 2" in "".join(capsys.readouterr())
    assert [record["step"] for record in curve(tmp_path / "run")] == list(range(5))
    main(["generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "def", "--max-new-tokens", "2"])
    with pytest.raises(SystemExit) as left:
        _train(text_folder, tmp_path / "run", "--steps", "4")
    assert left.value.code == 2
    assert "argument --steps: expected at least 5, as many as" in capsys.readouterr().err


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_processes_go_on_as_one_does(text_folder: Path, tmp_path: Path, parallel: str) -> None:
    for steps in ("2", "5"):
        _train(text_folder, tmp_path / "one", "--steps", steps)
        options = ("--steps", steps, "--parallel", parallel)
        run_together(2, tmp_path / "output", _train, text_folder, tmp_path / "two", *options)
    for one, other in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert math.isclose(curve(tmp_path / "two")[4]["lr"], replace(BEGUN, steps=5).learning_rate(4))


def _train(text: Path, out: Path, *options: str) -> None:
    train("--pack", "--warmup-steps", "2", "--checkpoint-every", "3", "--text", text, "--out", out, *options)
