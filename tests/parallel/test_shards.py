"""An incomplete checkpoint of shards raises an error; the trainer and the previous checkpoint are unchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexnsa.files import FileError
from flexnsa.lm import Trainer
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.parallel import Ranks
from flexnsa.lm.training.checkpoint import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from flexnsa.lm.training.model_file import read_model
from tests.lm.training.runs import Sharded
from tests.parallel.steps import make_trainer


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def write_header(folder: Path, header: dict[str, Any]) -> None:
    (folder / "header.json").write_bytes(sealed(header))


def other_step(folder: Path) -> None:
    write_header(folder, unsealed((folder / "header.json").read_bytes()) | {"step": -3})


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut shard": (cut("__0_0.distcp"), "not a whole checkpoint of shards .*is cut"),
    "lost shard": (lambda folder: (folder / "__0_0.distcp").unlink(), "not a whole checkpoint of shards"),
    "lost header": (lambda folder: (folder / "header.json").unlink(), "not a whole checkpoint of shards"),
    "half a header": (lambda folder: write_header(folder, {"step": 1, "files": {}}), "header lacks model"),
    "no step": (other_step, "expected a number of steps in its header, got -3"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_folder_is_refused_and_the_trainer_stays(tmp_path: Path, case: str) -> None:
    trainer = make_trainer(Sharded())
    trainer.train_step()
    path = checkpoint_path(tmp_path, trainer)
    save_checkpoint(path, trainer)
    spoil, message = SPOILT[case]
    spoil(path)
    fresh = make_trainer(Sharded(), seed=0)
    before = copies(fresh)
    with pytest.raises(FileError, match=f"^{path}: .*{message}"):
        load_checkpoint(path, fresh)
    assert fresh.step == 0
    assert not fresh.optimizer.state
    assert all(torch.equal(old, new) for old, new in zip(before, copies(fresh), strict=True))


@pytest.mark.parametrize("writer", [Ranks, Sharded])
@pytest.mark.parametrize("reader", [Ranks, Sharded])
def test_either_form_is_read_by_either_kind_of_run(tmp_path: Path, writer: type[Ranks], reader: type[Ranks]) -> None:
    trainer = make_trainer(writer())
    trainer.train_step()
    save_checkpoint(checkpoint_path(tmp_path, trainer), trainer)
    other = make_trainer(reader())
    path = newest_checkpoint(tmp_path)
    assert path is not None
    load_checkpoint(path, other)
    assert all(torch.equal(one, two) for one, two in zip(copies(trainer), read_model(path).parameters(), strict=True))
    assert other.train_step() == trainer.train_step()
    assert all(torch.equal(one, two) for one, two in zip(copies(trainer), copies(other), strict=True))


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


def copies(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]
