"""Damaged files of a run raise errors that name them, whichever bit is flipped, and other files are unchanged."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from flexnsa.files import FileError
from flexnsa.lm.checkpoint import shards, whole_file
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.checkpoint.log import JSONLog, read_log
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.lm.training.model_file import read_model
from tests.lm.training.runs import Sharded
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


def _flips(size: int) -> dict[str, Callable[[bytes], bytes]]:
    """Flip a bit in the first byte, the last, and some between."""

    def at(place: int, bit: int) -> Callable[[bytes], bytes]:
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
    save_checkpoint(checkpoint_path(tmp_path, resumed), resumed)
    assert [*tmp_path.iterdir()] == [checkpoint_path(tmp_path, resumed)]  # nothing half-made stays
