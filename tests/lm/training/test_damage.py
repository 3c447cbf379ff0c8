"""Damaged files of a run raise errors that name them, whichever bit is flipped, and other files are unchanged."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from flexnsa.files import FileError, FileWarning
from flexnsa.lm.checkpoint import shards, whole_file
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.checkpoint.log import JSONLog, read_log
from flexnsa.lm.cli import main
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.lm.training.model_file import read_model
from tests.lm.cli.tiny_run import contents, train, write_text
from tests.parallel.steps import make_trainer
from tests.support.damage import flip, places

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "cut": lambda data: data[:-1],
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut in its first part": lambda data: data[:20],
    "empty": lambda _: b"",
    "twice": lambda data: data + data,
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


class Sharded(Ranks):
    """One rank, which holds all shards."""

    sharded = True


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder / "run", write_text(folder / "text"), "--steps", "3", "--checkpoint-every", "2")
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole_run: Path) -> Path:
    """A copy of a run, in ``run``, and its text."""
    return shutil.copytree(whole_run, tmp_path / "copy")


def _resume(folder: Path) -> None:
    train(folder / "run", folder / "text", "--steps", "3", "--checkpoint-every", "2")


def _generate(folder: Path) -> None:
    main(["generate", "--checkpoint", str(folder / "run"), "--prompt", "def", "--device", "cpu"])


def _said_in_leaving(command: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        command()
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    return line


def test_no_bit_of_a_record_can_be_another() -> None:
    whole = sealed({"step": 7, "loss": 3.25})
    assert unsealed(whole) == {"step": 7, "loss": 3.25}
    assert json.loads(whole)["checksum"].startswith("crc32:")
    for place in range(len(whole)):
        for bit in range(8):
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                unsealed(bytes(spoilt))


def test_a_record_of_any_size_has_a_checksum() -> None:
    record = {"losses": list(range(20_000)), "checked": {"last": True}}
    whole = bytearray(sealed(record, indent=1))
    assert unsealed(bytes(whole)) == record
    for place in (100, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        whole[place] ^= 1
        with pytest.raises(ValueError, match=r"."):
            unsealed(bytes(whole))
        whole[place] ^= 1


@pytest.mark.parametrize("command", [_resume, _generate])
def test_a_flipped_bit_of_a_checkpoint_is_refused_and_named(
    command: Callable[[Path], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, draws = folder / "run" / "checkpoint.safetensors", random.Random(0)
    whole = file.read_bytes()
    for place in places(file, 8):
        flip(file, place, draws.randrange(8))
        before = contents(folder)
        line = _said_in_leaving(lambda: command(folder), capsys)
        assert f"error: {file}: not a whole safetensors file (" in line
        assert contents(folder) == before
        file.write_bytes(whole)
    command(folder)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_seen(folder: Path) -> None:
    file, draws = folder / "run" / "checkpoint.safetensors", random.Random(1)
    whole = file.read_bytes()
    own = whole.index(b'"checksum"')
    for place in [*range(own, own + 30), *places(file, 200)]:
        flip(file, place, draws.randrange(8))
        with pytest.raises(FileError, match=rf"^{file}: not a whole safetensors file "):
            whole_file.read(file)
        file.write_bytes(whole)
    whole_file.read(file)


def _flips(size: int) -> dict[str, Damage]:
    """Flip a bit in the first byte, the last, and some between."""

    def at(place: int, bit: int) -> Damage:
        return lambda data: data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    draws = random.Random(size)
    chosen = {0, size - 1, *(draws.randrange(size) for _ in range(20))}
    return {f"bit of byte {place}": at(place, draws.randrange(8)) for place in sorted(chosen)}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "header.json"])
def test_a_damaged_file_of_a_sharded_checkpoint_is_refused_and_named(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(Sharded())
    trainer.train_step()
    path = checkpoint_path(tmp_path, trainer)
    save_checkpoint(path, trainer)
    file = path / name
    whole = file.read_bytes()
    fresh = make_trainer(Sharded(), seed=0)
    before = [parameter.detach().clone() for parameter in fresh.parameters.values()]
    for how, damage in (DAMAGES | _flips(len(whole))).items():
        file.write_bytes(damage(whole))
        for read in (lambda: load_checkpoint(path, fresh), lambda: read_model(tmp_path)):
            with pytest.raises(FileError, match=rf"^{path}: not a whole checkpoint of shards ") as refused:
                read()
            assert name == "header.json" or f"{name} is cut or damaged" in str(refused.value), how
    assert fresh.step == 0
    assert not fresh.optimizer.state
    assert all(map(lambda old, new: old.equal(new), before, fresh.parameters.values()))
    file.write_bytes(whole)
    load_checkpoint(path, fresh)
    assert fresh.train_step() == trainer.train_step()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_named(how: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "run" / "checkpoint.safetensors"
    file.write_bytes(DAMAGES[how](file.read_bytes()))
    for command in (_resume, _generate):
        line = _said_in_leaving(lambda command=command: command(folder), capsys)
        assert f"error: {file}: not a whole safetensors file (" in line


def test_the_line_of_a_log_is_named_whichever_bit_is_another(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JSONLog(path, 0)
    for step in range(3):
        log.write({"step": step, "loss": 5.5 - step})
    log.close()
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            flip(path, place, bit)
            line = whole[:place].count(b"\n") + 1
            with pytest.raises(FileError, match=rf"^{path}: line {line} is no record of a training step; "):
                JSONLog(path, 3)
            path.write_bytes(whole)
    assert [record["step"] for record in read_log(path)] == [0, 1, 2]


def test_a_file_without_a_checksum_is_refused(tmp_path: Path) -> None:
    log, checkpoint = tmp_path / "log.jsonl", tmp_path / "checkpoint.safetensors"
    log.write_text('{"step": 0}\n')
    save_file({}, checkpoint)
    for read, path in ((read_log, log), (whole_file.read, checkpoint)):
        with pytest.raises(FileError, match=f"^{path}: .*its checksum is missing or damaged"):
            read(path)


def test_a_damaged_log_is_named_and_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "run" / "log.jsonl"
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for data, line in ((whole[:second] + whole[second:].replace(b"1", b"3", 1), 2), (whole + whole, 4)):
        file.write_bytes(data)
        before = contents(folder)
        said = _said_in_leaving(lambda: _resume(folder), capsys)
        assert f"error: {file}: line {line} is no record of a training step; " in said
        assert contents(folder) == before


def test_a_line_that_was_cut_at_any_byte_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    line = sealed({"step": 1, "loss": 4.5})
    for length in range(len(line) + 1):
        path.write_bytes(sealed({"step": 0}) + b"\n" + line[:length])
        JSONLog(path, 1).close()
        assert read_log(path) == [{"step": 0}]


def test_a_log_that_has_lost_steps_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(sealed({"step": 0}) + b"\n")
    with pytest.warns(match=rf"^{path}: lacks the steps from 1 to 3, after which the run goes on"):
        JSONLog(path, 4).close()


def test_a_damaged_record_of_the_environment_is_written_anew(folder: Path) -> None:
    run = folder / "run"
    file = run / "environment.json"
    whole = file.read_bytes()
    flipped = whole[:50] + bytes([whole[50] ^ 128]) + whole[51:]
    for damaged in (flipped, b"\xff\n", whole[:-9], b""):
        file.write_bytes(whole + damaged)
        (run / "checkpoint.safetensors").unlink()  # else there is nothing left to do
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _resume(folder)
        said = [str(warning.message) for warning in caught if warning.category is FileWarning]
        assert said == [f"{file}: damaged, and written anew without its damaged lines"] * (damaged != b"")
        lines = file.read_bytes().splitlines()
        assert lines[0] == whole.strip()
        assert [unsealed(line)["gpus"] for line in lines] == [[], []]


@pytest.mark.parametrize("stage", ["save_file", "seal", "fsync", "replace"])
@pytest.mark.parametrize("ranks", [Ranks, Sharded])
def test_who_is_killed_in_a_checkpoint_finds_the_one_before(
    stage: str, ranks: type[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    trainer, resumed = make_trainer(ranks()), make_trainer(ranks(), seed=0)
    trainer.train_step()
    save_checkpoint(checkpoint_path(tmp_path, trainer), trainer)
    wanted = trainer.train_step()
    if stage == "seal":
        monkeypatch.setattr(shards, "sealed", kill)
        monkeypatch.setattr(whole_file, stage, kill)
    else:
        owner = {"save_file": "safetensors.torch.save_file", "fsync": "os.fsync", "replace": "pathlib.Path.replace"}
        monkeypatch.setattr(owner[stage], kill)
    if stage == "save_file":
        monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", kill)
    with pytest.raises((KilledError, OSError)):  # PyTorch makes an error of what its writers meet
        save_checkpoint(checkpoint_path(tmp_path, trainer), trainer)
    monkeypatch.undo()
    path = newest_checkpoint(tmp_path)
    assert path is not None
    load_checkpoint(path, resumed)
    assert resumed.step == 1
    assert resumed.train_step() == wanted
