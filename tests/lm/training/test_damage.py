"""Damaged or incomplete checkpoints raise errors that name them, and what was there before stays as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flexnsa.attention.interface import given
from flexnsa.files import FileError
from flexnsa.lm import Trainer
from flexnsa.lm.checkpoint import shards, whole_file
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.checkpoint.log import JSONLog, read_log
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.lm.training.model_file import read_model
from tests.lm.cli.tiny_run import with_tensor
from tests.lm.training.runs import Sharded, untouched
from tests.parallel.steps import make_trainer
from tests.support.damage import DAMAGES, flip, places


@pytest.mark.parametrize(
    ("record", "where"),
    [({"step": 7, "loss": 3.25}, slice(None)), ({"losses": [*range(20_000)]}, slice(100, None, 9999))],
)
def test_no_bit_of_a_record_can_be_another(record: dict[str, Any], where: slice) -> None:
    whole = sealed(record)
    assert unsealed(whole) == record
    assert json.loads(whole)["checksum"].startswith("crc32:")
    for place in range(len(whole))[where]:
        for bit in range(8):
            spoilt = bytearray(whole)
            spoilt[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                unsealed(bytes(spoilt))


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_seen(tmp_path: Path) -> None:
    file, draws = tmp_path / "checkpoint.safetensors", random.Random(1)
    save_checkpoint(file, make_trainer(Ranks()))
    whole = file.read_bytes()
    own = whole.index(b'"checksum"')
    for place in [*range(own, own + 30), *places(file, 200)]:
        flip(file, place, draws.randrange(8))
        with pytest.raises(FileError, match=rf"^{file}: not a whole safetensors file "):
            whole_file.read(file)
        file.write_bytes(whole)
    whole_file.read(file)


def saved(folder: Path, ranks: Ranks) -> tuple[Path, Trainer]:
    """Write a checkpoint behind the first step; return it and its trainer."""
    trainer = make_trainer(ranks)
    trainer.train_step()
    path = checkpoint_path(folder, trainer)
    save_checkpoint(path, trainer)
    return path, trainer


def _flips(size: int) -> dict[str, Callable[[bytes], bytes]]:
    """Flip a bit in the first byte, the last, and some between."""

    def at(place: int, bit: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    draws = random.Random(size)
    chosen = {0, size - 1, *(draws.randrange(size) for _ in range(20))}
    return {f"bit of byte {place}": at(place, draws.randrange(8)) for place in sorted(chosen)}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "header.json"])
def test_a_damaged_file_of_a_sharded_checkpoint_is_refused_and_named(tmp_path: Path, name: str) -> None:
    path, trainer = saved(tmp_path, Sharded())
    file, fresh = path / name, make_trainer(Sharded(), seed=0)
    whole = file.read_bytes()
    with untouched(fresh):
        for how, damage in (DAMAGES | _flips(len(whole))).items():
            file.write_bytes(damage(whole))
            for read in (lambda: load_checkpoint(path, fresh), lambda: read_model(tmp_path)):
                with pytest.raises(FileError, match=rf"^{path}: not a whole checkpoint of shards ") as refused:
                    read()
                assert name == "header.json" or f"{name} is cut or damaged" in str(refused.value), how
    file.write_bytes(whole)
    load_checkpoint(path, fresh)
    assert fresh.train_step() == trainer.train_step()


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


@pytest.mark.parametrize("stage", ["save_file", "seal", "fsync", "replace"])
@pytest.mark.parametrize("ranks", [Ranks, Sharded])
def test_who_is_killed_in_a_checkpoint_finds_the_one_before(
    stage: str, ranks: type[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise KilledError

    resumed, (_, trainer) = make_trainer(ranks(), seed=0), saved(tmp_path, ranks())
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
    path = given(newest_checkpoint(tmp_path))
    load_checkpoint(path, resumed)
    assert resumed.step == 1
    assert resumed.train_step() == wanted
    save_checkpoint(checkpoint_path(tmp_path, resumed), resumed)
    assert [*tmp_path.iterdir()] == [checkpoint_path(tmp_path, resumed)]  # nothing half-made stays


def write_header(folder: Path, header: dict[str, Any]) -> None:
    (folder / "header.json").write_bytes(sealed(header))


def other_step(folder: Path) -> None:
    write_header(folder, unsealed((folder / "header.json").read_bytes()) | {"step": -3})


SPOILT: dict[str, tuple[type[Ranks], Callable[[Path], object], str]] = {
    "lost shard": (Sharded, lambda folder: (folder / "__0_0.distcp").unlink(), "not a whole checkpoint of shards"),
    "lost header": (Sharded, lambda folder: (folder / "header.json").unlink(), "not a whole checkpoint of shards"),
    "half a header": (Sharded, lambda folder: write_header(folder, {"step": 1, "files": {}}), "header lacks model"),
    "no step": (Sharded, other_step, "expected a number of steps in its header, got -3"),
    **{
        f"no {lost}": (Ranks, with_tensor(lost, None), rf"expected \S*{lost}\S* to be .* got none; ")
        for lost in ("head.weight", "optimizer.head.weight.exp_avg", "optimizer.", "rng.cpu")
    },
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_checkpoint_is_refused_and_the_trainer_stays(tmp_path: Path, case: str) -> None:
    ranks, spoil, message = SPOILT[case]
    fresh, (path, _) = make_trainer(ranks(), seed=0), saved(tmp_path, ranks())
    spoil(path)
    with untouched(fresh), pytest.raises(FileError, match=f"^{path}: .*{message}"):
        load_checkpoint(path, fresh)


@pytest.mark.parametrize("writer", [Ranks, Sharded])
@pytest.mark.parametrize("reader", [Ranks, Sharded])
def test_either_form_is_read_by_either_kind_of_run(tmp_path: Path, writer: type[Ranks], reader: type[Ranks]) -> None:
    other, (_, trainer) = make_trainer(reader()), saved(tmp_path, writer())
    path = given(newest_checkpoint(tmp_path))
    load_checkpoint(path, other)
    assert all(map(torch.equal, trainer.model.parameters(), read_model(path).parameters()))
    assert other.train_step() == trainer.train_step()
    assert all(map(torch.equal, trainer.model.parameters(), other.model.parameters()))


def test_the_one_that_has_come_furthest_is_taken_and_older_shards_go(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    whole, sharded = make_trainer(Ranks()), make_trainer(Sharded())
    save_checkpoint(checkpoint_path(tmp_path, sharded), sharded)
    whole.train_step()
    save_checkpoint(checkpoint_path(tmp_path, whole), whole)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint.safetensors"
    for _ in range(2):
        sharded.train_step()
    save_checkpoint(checkpoint_path(tmp_path, sharded), sharded)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2.dcp"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2.dcp", "checkpoint.safetensors"]
