"""What a checkpoint holds, in whichever form it lies on a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

REMEDY = "restore it from a copy, or move it away to begin anew"


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that is there and whole.

    Args:
        header: values encoded as JSON, by name.
        layout: tensors of the stored shapes and dtypes; they need not have memory.
        load_into: put the stored values into tensors of these names, which ranks may have sharded.
    """

    header: Mapping[str, str]
    layout: Mapping[str, Tensor]
    load_into: Callable[[Mapping[str, Tensor]], None]
