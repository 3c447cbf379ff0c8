"""Checkpoints: one safetensors file that holds all a run needs to go on, replaced in one move."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexnsa.errors import FileError

if TYPE_CHECKING:
    from flexnsa.training.trainer import Trainer

FREE = {"recompute"}
"""Fields that no number depends on: a run may go on with others."""
_REMEDY = "restore it from a copy, or move it away to begin anew"


def save_checkpoint(path: Path, trainer: Trainer) -> None:
    """Write the trainer's state; whoever is killed half-way leaves the previous checkpoint whole.

    Tensors are named ``model.<parameter>``, ``optimizer.<parameter>.<moment>`` and ``rng.<device>``; the header
    holds the step, which is also the position in the data, and both configs.

    Raises:
        OSError: the file could not be written; names it.
    """
    from safetensors import SafetensorError
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
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        # A full disk comes as either of the two, and neither says which file
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OSError(getattr(error, "errno", errno.EIO), reason, str(path)) from error


def load_checkpoint(path: Path, trainer: Trainer) -> None:
    """Put a trainer where :func:`save_checkpoint` left it; one that the checkpoint does not fit stays as it is.

    Raises:
        FileError: the file is no checkpoint, or not a whole one.
        FileError: it is of another model or another way of training; names the first field that differs.
    """
    header, tensors = read_checkpoint(path, ("step", "model", "training", "corpus"))
    for name, asked in trainer.configs().items():
        _require_equal(name, header[name], json.loads(json.dumps(asked)), path)
    step = header["step"]
    if not isinstance(step, int) or step < 0:
        raise FileError(f"{path}: expected a number of steps in its header, got {step!r}; {_REMEDY}")
    check_tensors(path, tensors, _layout(trainer, step, tensors))

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
    trainer.step = step


def read_checkpoint(path: Path, fields: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header, decoded, and all tensors on the CPU.

    Raises:
        FileError: the file cannot be read, or its header lacks one of ``fields``.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            encoded = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: not a whole safetensors file ({error}); {_REMEDY}") from error
    missing = [name for name in fields if name not in encoded]
    if missing:
        raise FileError(f"{path}: not of a training run, its header lacks {', '.join(missing)}; {_REMEDY}")
    try:
        return {name: json.loads(encoded[name]) for name in fields or encoded}, tensors
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: not of a training run, its header is not JSON ({error}); {_REMEDY}") from error


def check_tensors(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Demand the tensors that are expected, each of its shape and dtype, and none else of the model.

    Raises:
        FileError: one is missing, or is another.
    """
    for name in (*expected, *(name for name in found if name.startswith("model."))):
        there, wanted = _describe(found.get(name)), _describe(expected.get(name))
        if there != wanted:
            raise FileError(f"{path}: expected {name} to be {wanted}, got {there}; {_REMEDY}")


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"


def _layout(trainer: Trainer, step: int, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the tensors that a checkpoint has to hold, as they would look."""
    layout = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    layout["rng.cpu"] = torch.get_rng_state()
    if "rng.cuda" in found and trainer.device.type == "cuda":
        layout["rng.cuda"] = torch.cuda.get_rng_state(trainer.device)
    for name, parameter in trainer.model.named_parameters():
        if step and parameter.requires_grad:
            moments = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            layout |= {f"optimizer.{name}.{moment}": like for moment, like in moments.items()}
    return layout


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _require_equal(name: str, saved: Any, asked: Any, path: Path) -> None:
    if isinstance(saved, dict) and isinstance(asked, dict):
        for key in (saved.keys() | asked.keys()) - FREE:
            _require_equal(key, saved.get(key), asked.get(key), path)
    elif saved != asked:
        raise FileError(f"{name}: expected {saved!r}, as in the checkpoint {str(path)!r}, got {asked!r}")
