"""A checkpoint as a folder of torch.distributed.checkpoint, to which every rank writes the shards that it holds.

The folder has its step in its name, so that the next one can be whole before it is taken away.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.distributed import Ranks
from flexnsa.errors import FileError
from flexnsa.training.stored import REMEDY, Stored

SUFFIX = ".dcp"
_HEADER = "header.json"
_NAME = re.compile(r"checkpoint-(\d+)\.dcp")


def path_of(folder: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return folder / f"checkpoint-{step}{SUFFIX}"


def step_of(path: Path) -> int | None:
    """Undo :func:`path_of`, for what has such a name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], ranks: Ranks) -> None:
    """Write a folder, all ranks together, then remove those of other steps beside it.

    Raises:
        OSError: it could not be written; names it. Those of other steps are still there.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    temporary = path.with_name(path.name + ".tmp")

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def finish() -> None:
        with (temporary / _HEADER).open("w") as file:
            json.dump({name: json.loads(value) for name, value in header.items()}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)  # of the same step, and so of the same numbers
        temporary.replace(path)
        for other in path.parent.iterdir():
            if step_of(other) is not None and other != path:
                shutil.rmtree(other, ignore_errors=True)

    ranks.on_first(begin)
    try:
        with _silent_when_alone():
            save_together(dict(tensors), checkpoint_id=temporary)
    except CheckpointException as error:
        raise OSError(errno.EIO, _first_reason(error), str(path)) from error
    ranks.on_first(finish)


def read(path: Path) -> Stored:
    """Look into a folder; its tensors stay on the disk until they are loaded.

    Raises:
        FileError: it is none of :func:`save`, or not whole.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        header = json.loads((path / _HEADER).read_text())
        metadata = FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            if (path / name).stat().st_size < end:
                raise EOFError(f"{name} is cut")
    except Exception as error:
        # Whatever unpickling foreign bytes may raise
        raise FileError(f"{path}: not a whole checkpoint of shards ({error!r}); {REMEDY}") from error
    layout = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }

    def load_into(targets: Mapping[str, Tensor]) -> None:
        state: dict[str, Any] = dict(targets)
        try:
            with _silent_when_alone():
                load(state, checkpoint_id=path)
        except CheckpointException as error:
            raise FileError(f"{path}: cannot be read ({_first_reason(error)}); {REMEDY}") from error

    return Stored({name: json.dumps(value) for name, value in header.items()}, layout, load_into)


@contextmanager
def _silent_when_alone() -> Iterator[None]:
    """Let one process use the functions of many without being told that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _first_reason(error: Any) -> str:
    return next((str(reason) for reason, _ in error.failures.values()), str(error))
