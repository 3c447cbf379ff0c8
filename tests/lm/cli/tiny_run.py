"""A training run of a fraction of a second, and the ways in which its files can be spoilt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flexnsa.lm.checkpoint import whole_file
from flexnsa.lm.cli import main
from tests.support.damage import DAMAGES

SIZES = (
    "--dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 1 --seq-len 24 "
    "--steps 2 --eval-sequences 1 --device cpu"
)


def train(folder: Path, text: Path, *options: str) -> None:
    main(["train", "--text", str(text), "--out", str(folder), *SIZES.split(), *options])


def write_text(file: Path) -> Path:
    file.write_text("def zürich():\n    return 8001\n\n\n" * 40)
    return file


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock, which names the last process."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".flexnsa.lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _header(**changes: object) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        header |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
        whole_file.save(file, tensors, {name: value for name, value in header.items() if value != "null"})

    return spoil


def with_tensor(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    """Have a file hold another tensor of a name, or none of a name with this in it."""

    def spoil(file: Path) -> None:
        with safe_open(file, framework="pt") as opened:
            header, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        kept = {key: value for key, value in tensors.items() if name not in key}
        whole_file.save(file, kept if tensor is None else kept | {name: tensor}, header)

    return spoil


def _damaged(damage: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(damage(file.read_bytes()))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


SPOILT: dict[str, Callable[[Path], object]] = {
    **{how: _damaged(damage) for how, damage in DAMAGES.items()},
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 8),
    "pickled": lambda file: torch.save({"model": torch.zeros(3)}, file),
    "foreign": lambda file: save_file({"weight": torch.zeros(3)}, file),
    "a folder": _folder,
    "without its model": _header(model=None),
    "of no JSON": _header(model="{"),
    "of a number for a model": _header(model=5),
    "of half a model": _header(model={"dim": 16}),
    "without the head": with_tensor("model.head.weight", None),
    "of another shape": with_tensor("model.head.weight", torch.zeros(2, 2)),
    "of another kind": with_tensor("model.head.weight", torch.zeros(256, 16, dtype=torch.int64)),
    "with more than the model": with_tensor("model.tail.weight", torch.zeros(2)),
}
"""Damages of ``checkpoint.safetensors`` for every command that reads it."""

SPOILT_FOR_TRAINING: dict[str, Callable[[Path], object]] = SPOILT | {
    "without its step": _header(step=None),
    "of a step that is no number": _header(step="many"),
    "of a step before the first": _header(step=-1),
    "without the text's fingerprint": _header(corpus=None),
    "of another way of training": _header(training={"lr": 3}),
    "without a moment": with_tensor("optimizer.head.weight.exp_avg", None),
    "without the state of the draws": with_tensor("rng.cpu", None),
}
