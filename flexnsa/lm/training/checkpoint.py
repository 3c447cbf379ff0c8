"""Checkpoints: the state that a run resumes from, under the same names in a file and in a folder of shards.

Tensors are named ``model.<parameter>``, ``optimizer.<parameter>.<moment>`` and ``rng.<device>``; the header holds the
step, which is also the position in the data, and the configs. Any number of processes can read one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexnsa.files import FileError
from flexnsa.lm.checkpoint import shards, whole_file
from flexnsa.lm.checkpoint.whole_file import REMEDY, Stored
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.config import TrainConfig, completed

if TYPE_CHECKING:
    from flexnsa.lm.training.trainer import Trainer

CHECKPOINT_NAME = "checkpoint.safetensors"
FREE = {"checkpointing", "recompute", "steps"}
"""Fields that may change when a run resumes: results depend only on ``steps``, which decides the rates to come."""

Moments = dict[Tensor, Any]
"""The state of the optimizer for each parameter, by name."""


def checkpoint_path(folder: Path, trainer: Trainer) -> Path:
    """Return the path of the trainer's state in the folder of a run."""
    return shards.path_of(folder, trainer.step) if trainer.ranks.sharded else folder / CHECKPOINT_NAME


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint in the folder of a run.

    Raises:
        FileError: there is one in each form, and the step of one cannot be read.
    """
    steps = {path: step for path in folder.iterdir() if (step := shards.step_of(path)) is not None}
    file = folder / CHECKPOINT_NAME
    if not steps:
        return file if file.exists() else None
    if file.exists():
        steps[file] = _step(file, _decoded(file, whole_file.read(file), ("step",)))
    return max(steps, key=steps.__getitem__)


def configs_of_run(folder: Path) -> tuple[DecoderConfig, TrainConfig] | None:
    """Read the configs of the run in a folder, or return None if there is none.

    Raises:
        FileError: its checkpoint cannot be read.
    """
    path = newest_checkpoint(folder) if folder.is_dir() else None
    if path is None:
        return None
    header = _decoded(path, _read(path, Ranks()), ("model", "training"))
    try:
        return DecoderConfig.from_dict(header["model"]), TrainConfig(**header["training"])
    except (TypeError, ValueError) as error:
        raise FileError(f"{path}: not of a training run, its header has other fields ({error}); {REMEDY}") from error


def save_checkpoint(path: Path, trainer: Trainer) -> None:
    """Write the trainer's state; a process that is killed meanwhile leaves the previous checkpoint whole.

    Raises:
        OSError: it could not be written; names the path.
    """
    header = {name: json.dumps(value) for name, value in {"step": trainer.step, **trainer.configs()}.items()}
    state = _state(trainer, trainer.optimizer.state)
    if trainer.ranks.sharded:
        shards.save(path, state, header, trainer.ranks)
    else:
        trainer.ranks.on_first(lambda: whole_file.save(path, state, header))


def load_checkpoint(path: Path, trainer: Trainer) -> int:
    """Restore the state of :func:`save_checkpoint`; a trainer that does not fit the checkpoint is unchanged.

    Returns:
        The planned number of steps of the run when the checkpoint was written.

    Raises:
        FileError: it is not a whole checkpoint.
        FileError: the model or the training differs; names the first field that does.
        FileError: it is of a later step than the trainer's last.
    """
    stored = _read(path, trainer.ranks)
    header = _decoded(path, stored, ("step", "model", "training", "corpus"))
    _check_tokenizer(header["corpus"], trainer, path)
    began = header["training"]
    try:
        config = completed(trainer.asked, began["compressor_lr"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not of a training run, its header has {began!r} ({error!r}); {REMEDY}") from error
    for name, asked in (trainer.configs() | {"training": asdict(config)}).items():
        _require_equal(name, header[name], json.loads(json.dumps(asked)), path)
    step = _step(path, header)
    if step > config.steps:
        raise FileError(f"steps: expected at least {step}, as many as {str(path)!r} has done, got {config.steps}")
    moments = _new_moments(trainer, stored.layout) if step else {}
    state = _state(trainer, moments)
    if "rng.cuda" not in stored.layout:  # started on another device
        state.pop("rng.cuda", None)
    check_tensors(path, stored.layout, state)
    _check_shared(path, stored.layout, trainer)

    trainer.go_by(config)
    stored.load_into(state)
    trainer.optimizer.state.update(moments)
    torch.set_rng_state(state["rng.cpu"])
    if "rng.cuda" in state:
        torch.cuda.set_rng_state(state["rng.cuda"], trainer.device)
    trainer.step = step
    return began.get("steps", config.steps)


def read_checkpoint(path: Path, fields: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the whole header, decoded, and all tensors on the CPU.

    Raises:
        FileError: the checkpoint cannot be read, or its header lacks one of ``fields``.
    """
    stored = _read(path, Ranks())
    header = _decoded(path, stored, tuple(dict.fromkeys((*fields, *stored.header))))
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in stored.layout.items()}
    stored.load_into(tensors)
    return header, tensors


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint has the expected tensors, with their shapes and dtypes, and no others of the model.

    Raises:
        FileError: one is missing, or differs.
    """
    for name in (*expected, *(name for name in tensors if name.startswith("model."))):
        there, required = _describe(tensors.get(name)), _describe(expected.get(name))
        if there != required:
            raise FileError(f"{path}: expected {name} to be {required}, got {there}; {REMEDY}")


def _check_shared(path: Path, tensors: Mapping[str, Tensor], trainer: Trainer) -> None:
    """Check that modules that share a parameter have one state of the optimizer for it: only one could be kept."""
    for name in tensors:
        kind, _, moment = name.partition(".")
        parameter = moment.rpartition(".")[0]
        if kind == "optimizer" and parameter not in trainer.parameters:
            expected = f"expected {parameter}, which modules of the model share, to have learned as one with the other"
            raise FileError(f"{path}: {expected}, got moments of its own; share parameters when a run begins")


def _describe(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"


def _read(path: Path, ranks: Ranks) -> Stored:
    return shards.read(path, ranks) if path.suffix == shards.SUFFIX else whole_file.read(path)


def _decoded(path: Path, stored: Stored, fields: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in fields if name not in stored.header]
    if missing:
        raise FileError(f"{path}: not of a training run, its header lacks {', '.join(missing)}; {REMEDY}")
    try:
        return {name: json.loads(stored.header[name]) for name in fields}
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: not of a training run, its header is not JSON ({error}); {REMEDY}") from error


def _step(path: Path, header: dict[str, Any]) -> int:
    step = header["step"]
    if not isinstance(step, int) or step < 0:
        raise FileError(f"{path}: expected a number of steps in its header, got {step!r}; {REMEDY}")
    return step


def _state(trainer: Trainer, moments: Moments) -> dict[str, Tensor]:
    """Name the tensors of a checkpoint: those of the trainer, and the given state of its optimizer."""
    state = {f"model.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, parameter in trainer.parameters.items():
        state |= {f"optimizer.{name}.{moment}": value for moment, value in moments.get(parameter, {}).items()}
    state["rng.cpu"] = torch.get_rng_state()
    if trainer.device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state(trainer.device)
    return state


def _new_moments(trainer: Trainer, tensors: Mapping[str, Tensor]) -> Moments:
    """Return empty state of AdamW for each parameter, but for what a dense stage has left out until now."""
    learned = {name.partition(".")[2].rpartition(".")[0] for name in tensors if name.startswith("optimizer.")}
    dense, frozen = trainer.config.dense_stages > 0, set(trainer.frozen)
    return {
        parameter: {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
        for name, parameter in trainer.parameters.items()
        if (parameter.requires_grad or parameter in frozen)
        and (name in learned or not (dense and ".attention." in name))
    }


def _check_tokenizer(corpus: Any, trainer: Trainer, path: Path) -> None:
    """Check the tokenizer against that of the checkpoint; the error names its file, which may be damaged."""
    saved = corpus.get("tokenizer_sha256") if isinstance(corpus, dict) else None
    tokenized = trainer.corpus.tokenized
    if saved is not None and tokenized is not None and saved != tokenized.tokenizer.sha256():
        got = f"{tokenized.tokenizer.sha256()!r} of {str(tokenized.tokenizer.path)!r}"
        raise FileError(f"tokenizer_sha256: expected {saved!r}, as in the checkpoint {str(path)!r}, got {got}")


def _require_equal(name: str, saved: Any, asked: Any, path: Path) -> None:
    if isinstance(saved, dict) and isinstance(asked, dict):
        for key in sorted((saved.keys() | asked.keys()) - FREE):  # sorted, so that all ranks name the same field
            _require_equal(key, saved.get(key), asked.get(key), path)
    elif saved != asked:
        raise FileError(f"{name}: expected {saved!r}, as in the checkpoint {str(path)!r}, got {asked!r}")
