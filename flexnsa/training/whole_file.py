"""A checkpoint as one safetensors file, replaced in one move."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from flexnsa.errors import FileError
from flexnsa.layers.spread import write
from flexnsa.training.stored import REMEDY, Stored


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file; whoever is killed half-way leaves the one that was there before.

    Raises:
        OSError: the file could not be written; names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(_apart(tensors), temporary, metadata=dict(header))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        # A full disk comes as either of the two, and neither says which file
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OSError(getattr(error, "errno", errno.EIO), reason, str(path)) from error


def read(path: Path) -> Stored:
    """Read a file, its tensors on the CPU.

    Raises:
        FileError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: not a whole safetensors file ({error}); {REMEDY}") from error

    def load_into(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            write(target, tensors[name])

    return Stored(header, tensors, load_into)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of a memory that is there already, as layers that share a weight have them; the format has none."""
    apart, written = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        place = own.untyped_storage().data_ptr()
        apart[name] = own.clone() if place in written else own
        written.add(place)
    return apart
