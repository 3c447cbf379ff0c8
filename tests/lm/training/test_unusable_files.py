"""A file that cannot be read or written is named in one line that ends a run, and nothing is overwritten."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexnsa.files import FileWarning
from flexnsa.lm import Trainer
from flexnsa.lm.checkpoint import shards
from flexnsa.lm.checkpoint.checksum import unsealed
from flexnsa.lm.checkpoint.log import JSONLog, read_log
from flexnsa.lm.cli import main
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, newest_checkpoint, read_checkpoint, save_checkpoint
from tests.lm.cli.tiny_run import SIZES, SPOILT, SPOILT_FOR_TRAINING, contents, train, write_text
from tests.lm.training.runs import Sharded
from tests.parallel.processes import started
from tests.parallel.steps import make_trainer

OPTIONS = ("--steps", "5", "--checkpoint-every", "1")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


def _last_line(command: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.splitlines()[-1]


@pytest.mark.parametrize(
    ("num_bytes", "name"), [(0, ".flexnsa.lock"), (16, "environment.json"), (20_000, "checkpoint.safetensors")]
)
def test_the_file_that_does_not_fit_is_named(
    num_bytes: int, name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(num_bytes):
        line = _last_line(lambda: train(tmp_path / "run", text), capsys)
    assert line.startswith(f"flexnsa train: error: {tmp_path / 'run' / name}: ")
    train(tmp_path / "run", text)


@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_names_the_log_and_no_step_is_lost(
    room: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    log, write = folder / "log.jsonl", JSONLog.write

    def write_where_there_is_no_room(self: JSONLog, record: dict[str, Any]) -> None:
        with largest_file(log.stat().st_size + room if record["step"] == 2 else resource.RLIM_INFINITY):
            write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(JSONLog, "write", write_where_there_is_no_room)
        line = _last_line(lambda: train(folder, text, *OPTIONS), capsys)
    assert line.startswith(f"flexnsa train: error: {log}: ")
    assert read_checkpoint(folder / "checkpoint.safetensors")[0]["step"] == 2
    train(folder, text, *OPTIONS)
    assert [record["step"] for record in read_log(log)] == [0, 1, 2, 3, 4]


def test_no_step_is_taken_that_a_full_disk_has_no_room_to_log(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[int] = []

    def write(_: JSONLog, record: dict[str, Any]) -> None:
        logged.append(record["step"])
        raise OSError(28, "No space left on device", "log.jsonl")

    taken: list[int] = []
    step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: (taken.append(self.step), step(self))[1])
    monkeypatch.setattr(JSONLog, "write", write)
    _last_line(lambda: train(tmp_path / "run", text, "--steps", "9"), capsys)
    assert taken == logged == [0]


@pytest.mark.parametrize("name", [".flexnsa.lock", "environment.json", "log.jsonl", "stacks.rank-0.txt"])
def test_a_name_that_cannot_be_written_to_is_named(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    line = _last_line(lambda: train(tmp_path / "run", text), capsys)
    assert line.startswith(f"flexnsa train: error: {tmp_path / 'run' / name}: ")


@pytest.mark.parametrize("name", ["log.jsonl", "environment.json", "checkpoint.safetensors"])
def test_a_link_to_a_device_is_named_and_not_read_to_its_end(name: str, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir()
    file.symlink_to("/dev/full")
    with started(1, tmp_path / "output", _train_in_little_memory, file.parent, text) as group:
        assert group.wait() == [2], group.output(0)[-2000:]
    assert group.output(0).splitlines()[-1].startswith(f"flexnsa train: error: {file}: ")
    assert file.is_symlink()


def _train_in_little_memory(folder: Path, text: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    train(folder, text)


def test_a_matrix_names_the_file(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = SIZES.replace("--steps 2", "")
    command = ["diagnose", "matrix", "--text", str(text), "--out", str(tmp_path / "matrix"), *sizes.split()]
    with largest_file(16):
        line = _last_line(lambda: main([*command, "--axis", "ranks=1"]), capsys)
    assert line.startswith(f"flexnsa diagnose matrix: error: {tmp_path / 'matrix'}/branches=")
    assert "/case.json: " in line


@pytest.mark.parametrize(("ranks", "owner", "name"), [(Ranks, os, "fsync"), (Sharded, shards, "sealed")])
def test_a_checkpoint_that_does_not_fit_is_named(
    ranks: type[Ranks], owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(ranks())
    path = checkpoint_path(tmp_path, trainer)

    def full(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left") as met:
        save_checkpoint(path, trainer)
    assert met.value.filename == str(path)


@pytest.mark.parametrize(("parallel", "rank", "name"), [("ddp", 0, "log.jsonl"), ("fsdp2", 1, "log.rank-1.jsonl")])
def test_all_ranks_end_when_the_log_of_one_cannot_be_written(
    text: Path, tmp_path: Path, parallel: str, rank: int, name: str
) -> None:
    folder = tmp_path / "run"
    options = ("--parallel", parallel, "--log-ranks", "--batch-size", "2", "--eval-sequences", "2")
    with started(2, tmp_path / "output", _train_without_room, rank, folder, name, text, *options) as group:
        statuses = group.wait()
        output = [group.output(rank) for rank in range(2)]
    assert statuses == [2, 2], output
    for said in output:
        assert said.splitlines()[-1] == f"flexnsa train: error: {folder / name}: No space left on device"
        assert "Traceback" not in said
    path = newest_checkpoint(folder)
    assert path is not None
    assert read_checkpoint(path)[0]["step"] == 2


def _train_without_room(rank: int, folder: Path, name: str, text: Path, *options: str) -> None:
    write = JSONLog.write

    def write_where_there_is_no_room(self: JSONLog, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise OSError(28, "No space left on device", str(folder / name))
        write(self, record)

    if os.environ["RANK"] == str(rank):
        JSONLog.write = write_where_there_is_no_room
    train(folder, text, *OPTIONS, *options)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a run that has ended."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder / "run", write_text(folder / "text"))
    return contents(folder)


@pytest.fixture
def text_of_run(tmp_path: Path, whole_run: dict[str, bytes]) -> Path:
    """The text, in the same folder as ``run``."""
    (tmp_path / "run").mkdir()
    for name, data in whole_run.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path / "text"


READERS = [("train", how) for how in SPOILT_FOR_TRAINING] + [("generate", how) for how in SPOILT]


@pytest.mark.parametrize(("command", "how"), READERS)
def test_who_reads_a_checkpoint_names_it_and_leaves_it(
    command: str, how: str, text_of_run: Path, refused: Callable[..., str]
) -> None:
    file = text_of_run.parent / "run" / "checkpoint.safetensors"
    SPOILT_FOR_TRAINING[how](file)
    before = contents(text_of_run.parent)
    of_generate = ["generate", "--checkpoint", str(file.parent), "--prompt", "def", "--device", "cpu"]
    line = refused(train, file.parent, text_of_run) if command == "train" else refused(main, of_generate)
    assert line.startswith(f"flexnsa {command}: error: ")
    assert str(file) in line
    assert contents(text_of_run.parent) == before


def test_a_damaged_log_is_named_and_left(text_of_run: Path, refused: Callable[..., str]) -> None:
    file = text_of_run.parent / "run" / "log.jsonl"
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for data, line in ((whole[:second] + whole[second:].replace(b"1", b"3", 1), 2), (whole + whole, 3)):
        file.write_bytes(data)
        before = contents(text_of_run.parent)
        said = refused(train, file.parent, text_of_run)
        assert f"error: {file}: line {line} is no record of a training step; " in said
        assert contents(text_of_run.parent) == before


def test_a_damaged_record_of_the_environment_is_written_anew(text_of_run: Path) -> None:
    run = text_of_run.parent / "run"
    file = run / "environment.json"
    whole = file.read_bytes()
    flipped = whole[:50] + bytes([whole[50] ^ 128]) + whole[51:]
    for damaged in (flipped, b"\xff\n", whole[:-9], b""):
        file.write_bytes(whole + damaged)
        (run / "checkpoint.safetensors").unlink()  # else there is nothing left to do
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(run, text_of_run)
        said = [str(warning.message) for warning in caught if warning.category is FileWarning]
        assert said == [f"{file}: damaged, and written anew without its damaged lines"] * (damaged != b"")
        lines = file.read_bytes().splitlines()
        assert lines[0] == whole.strip()
        assert [unsealed(line)["gpus"] for line in lines] == [[], []]


def test_another_text_is_named(text_of_run: Path, refused: Callable[..., str]) -> None:
    text_of_run.write_text("another text " * 100)
    line = refused(train, text_of_run.parent / "run", text_of_run)
    assert "text_sha256: expected " in line
    assert str(text_of_run.parent / "run" / "checkpoint.safetensors") in line


def test_training_that_diverges_says_so(text_of_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        train(text_of_run.parent / "new", text_of_run, "--lr", "1e30", "--warmup-steps", "0", "--steps", "9")
    assert leaving.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("flexnsa train: error: step ")
