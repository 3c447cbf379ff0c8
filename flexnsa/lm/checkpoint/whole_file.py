"""A checkpoint as one safetensors file, and what any form of a checkpoint holds when it is read."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from flexnsa.files import FileError, replaced
from flexnsa.layers.sharding import write
from flexnsa.lm.checkpoint.checksum import FIELD, ZEROS, check, seal

REMEDY = "restore it from a copy, or move it away to begin anew"


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that is whole.

    Args:
        header: values encoded as JSON, by name.
        layout: tensors of the stored shapes and dtypes; they need not have memory.
        load_into: copies the stored values into tensors of these names, which may be sharded over ranks.
    """

    header: Mapping[str, str]
    layout: Mapping[str, Tensor]
    load_into: Callable[[Mapping[str, Tensor]], None]


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a file with its checksum; a process that is killed meanwhile leaves the previous file.

    Raises:
        OSError: the file could not be written; names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replaced(path, sync=True) as temporary:
        try:
            save_file(_apart(tensors), temporary, metadata={**header, FIELD: ZEROS})
        except SafetensorError as error:  # of a full disk, for example
            raise OSError(errno.EIO, str(error)) from error
        with temporary.open("r+b") as file:
            seal(file)


def read(path: Path) -> Stored:
    """Read a file, its tensors on the CPU.

    Raises:
        FileError: it cannot be read, or has no checksum or another.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as opened:
            check(opened)
        with safe_open(path, framework="pt") as file:
            header = {name: value for name, value in (file.metadata() or {}).items() if name != FIELD}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(f"{path}: not a whole safetensors file ({error}); {REMEDY}") from error

    def load_into(targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            write(target, tensors[name])

    return Stored(header, tensors, load_into)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with an earlier one, such as tied weights, because the format cannot share."""
    apart, written = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        own = tensor.contiguous()
        place = own.untyped_storage().data_ptr()
        apart[name] = own.clone() if place in written else own
        written.add(place)
    return apart
