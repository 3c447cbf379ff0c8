"""Checkpoints: one safetensors file that holds all a run needs to go on, replaced in one move."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexnsa.training.trainer import Trainer


def save_checkpoint(path: Path, trainer: Trainer) -> None:
    """Write the trainer's state; whoever is killed half-way leaves the previous checkpoint whole.

    Tensors are named ``model.<parameter>``, ``optimizer.<parameter>.<moment>`` and ``rng.<device>``; the header
    holds the step, which is also the position in the data, and both configs.
    """
    from safetensors.torch import save_file

    tensors = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        for moment, value in trainer.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{moment}"] = value
    tensors["rng.cpu"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(trainer.device)
    header = {name: json.dumps(value) for name, value in {"step": trainer.step, **trainer.configs()}.items()}

    temporary = path.with_name(path.name + ".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path, trainer: Trainer) -> None:
    """Put a trainer where :func:`save_checkpoint` left it.

    Raises:
        ValueError: the checkpoint is of another model or another way of training; names the first field that differs.
    """
    header, tensors = read_checkpoint(path)
    for name, asked in trainer.configs().items():
        _require_equal(name, header[name], json.loads(json.dumps(asked)), path)
    trainer.model.load_state_dict(_below("model.", tensors))
    for name, parameter in trainer.model.named_parameters():
        moments = _below(f"optimizer.{name}.", tensors)
        # AdamW keeps its step counts on the CPU, whatever the device of the moments
        trainer.optimizer.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
        }
    torch.set_rng_state(tensors["rng.cpu"])
    if "rng.cuda" in tensors and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["rng.cuda"], trainer.device)
    trainer.step = header["step"]


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header, decoded, and all tensors on the CPU."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = {name: json.loads(value) for name, value in file.metadata().items()}
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _require_equal(name: str, saved: Any, asked: Any, path: Path) -> None:
    if isinstance(saved, dict) and isinstance(asked, dict):
        for key in saved.keys() | asked.keys():
            _require_equal(key, saved.get(key), asked.get(key), path)
    elif saved != asked:
        raise ValueError(f"{name}: expected {saved!r}, as in the checkpoint {str(path)!r}, got {asked!r}")
