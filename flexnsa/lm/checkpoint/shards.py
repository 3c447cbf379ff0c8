"""A checkpoint as a folder of torch.distributed.checkpoint, to which every rank writes its shards.

The name of the folder has the step, so that it stays until the next one is whole.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.files import FileError, replaced, temporary_of, write_whole
from flexnsa.lm.checkpoint.checksum import checksum_of, sealed, unsealed
from flexnsa.lm.checkpoint.whole_file import REMEDY, Stored
from flexnsa.lm.parallel.ranks import Ranks

SUFFIX = ".dcp"
_HEADER = "header.json"
_TABLE = ".metadata"
_FILES = "files"
"""Field of the header: the checksums of the other files, by name."""
_NAME = re.compile(r"checkpoint-(\d+)\.dcp")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"checkpoint-{step}{SUFFIX}"


def step_of(path: Path) -> int | None:
    """Return the step of a path of :func:`path_of`, or None for another path."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], ranks: Ranks) -> None:
    """Write a folder, all ranks together, then remove those of other steps.

    Raises:
        OSError: it could not be written; names it. The folders of other steps are still there.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    temporary = temporary_of(path)

    def start() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def own_checksums() -> dict[str, str]:  # of files that this rank may still have in memory
        # Shards have the rank in their names, and rank 0 writes the table
        own = [*temporary.glob(f"__{ranks.rank}_*"), *([temporary / _TABLE] if ranks.rank == 0 else [])]
        return {file.name: checksum_of(file) for file in own}

    def finish() -> None:
        values = {name: json.loads(value) for name, value in header.items()}
        with replaced(path):
            write_whole(temporary / _HEADER, sealed(values | {_FILES: files}, indent=2), sync=True)
            shutil.rmtree(path, ignore_errors=True)  # of the same step, and so with the same values
        for other in path.parent.iterdir():
            if step_of(other) is not None and other != path:
                shutil.rmtree(other, ignore_errors=True)

    ranks.on_first(start)
    try:
        with _silent_when_alone():
            save_together(dict(tensors), checkpoint_id=temporary)
    except CheckpointException as error:
        raise OSError(errno.EIO, _first_reason(error), str(path)) from error
    files = {name: checksum for part in ranks.on_all(own_checksums) for name, checksum in part.items()}
    ranks.on_first(finish)


def read(path: Path, ranks: Ranks) -> Stored:
    """Read the header and the layout of a folder, all ranks together; tensors stay on the disk until they are loaded.

    Raises:
        FileError: :func:`save` did not write it, it is not whole, or a file in it differs from its checksum.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        header = unsealed((path / _HEADER).read_bytes())
        _check_files(path, header.pop(_FILES), ranks)
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        # Unpickling foreign bytes may raise anything
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


def _check_files(folder: Path, expected: Mapping[str, str], ranks: Ranks) -> None:
    """Compare files with their checksums, a part of them on each rank."""

    def find_damaged() -> list[str]:
        files = [folder / name for name in sorted(expected)[ranks.rank :: ranks.world_size]]
        return [file.name for file in files if not file.is_file() or checksum_of(file) != expected[file.name]]

    damaged = [name for part in ranks.on_all(find_damaged) for name in part]
    if damaged:
        raise EOFError(f"{', '.join(damaged)} is cut or damaged")


@contextmanager
def _silent_when_alone() -> Iterator[None]:
    """Hide the warning that PyTorch gives a process without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _first_reason(error: Any) -> str:
    return next((str(reason) for reason, _ in error.failures.values()), str(error))
