"""Runs of a small dense model by the command, what their logs say, ranks that write shards, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flexnsa.lm import DecoderConfig, DecoderLM, TrainConfig, Trainer, read_corpus
from flexnsa.lm.checkpoint.log import read_log
from flexnsa.lm.cli import main
from flexnsa.lm.parallel import Ranks

SIZES = (
    "--device cpu --attention dense --dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 "
    "--batch-size 2 --seq-len 32 --eval-sequences 2"
)


class Sharded(Ranks):
    """One rank, which holds all shards."""

    sharded = True


@contextmanager
def untouched(trainer: Trainer) -> Iterator[None]:
    """Demand that a trainer that refuses a checkpoint stays at its first step, with its own weights and no moments."""
    before = [parameter.detach().clone() for parameter in trainer.parameters.values()]
    yield
    assert trainer.step == 0
    assert not trainer.optimizer.state
    assert all(map(torch.equal, before, trainer.parameters.values()))


def trainer_of(text: Path, model: DecoderConfig, training: TrainConfig, seed: int = 0, **options: Any) -> Trainer:
    """Return a trainer of a model that ``seed`` draws."""
    torch.manual_seed(seed)
    return Trainer(DecoderLM(model), read_corpus(text), training, **options)


def train(*options: str | Path) -> None:
    main(["train", *SIZES.split(), *map(str, options)])


def curve(folder: Path, name: str = "log.jsonl") -> list[dict[str, float]]:
    """Return the whole lines of a log without what depends on the clock; nothing before there is one."""
    path = folder / name
    clock = ("tokens_per_second", "peak_mib")
    records = read_log(path) if path.exists() else []
    return [{name: x for name, x in record.items() if name not in clock} for record in records]
