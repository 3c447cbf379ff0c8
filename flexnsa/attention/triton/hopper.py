"""When the kernels of :mod:`flexnsa.attention.triton.kernels.hopper` run."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import ALIGNMENT, HOPPER, device_of

KNOWN_VERSIONS = ("3.6", "3.7")
"""Versions of Triton with which they were tested, those of PyTorch 2.11 to 2.13: Gluon is experimental."""

ROWS = 64
"""Rows of a tile, and keys: what one group of 4 warps multiplies at a time."""
SLOTS = 4
"""Rows of partial results that a thread loads at a time."""
DIMS = (64, 128)
"""Head dimensions."""


def runs_on_hopper(*read: Tensor, placed: bool, block_size: int = ROWS, group: int = 1, wide: bool = False) -> bool:
    """Return whether these kernels run.

    Args:
        read: the tensors whose rows they read or write, ``(B, H, S, D)``.
        placed: whether queries have positions.
        block_size: keys of a selected block, of that branch alone.
        group: query heads of a key head, likewise.
        wide: whether a chunk of queries needs 64-bit offsets, likewise.
    """
    fits = ROWS // 2 < block_size <= ROWS and group <= ROWS and not wide
    return fits and takes_heads(read[0], placed=placed) and all(map(_can_copy, read))


def takes_heads(q: Tensor, *dims: int, placed: bool) -> bool:
    """Return whether these kernels run for queries and head dimensions, provided that all rows are aligned.

    Dynamo can trace this.

    Args:
        q: the queries ``(B, H, T, D)``.
        dims: head dimensions to check.
        placed: whether queries have positions.
    """
    if placed or q.dtype not in (torch.bfloat16, torch.float16) or not all(dim in DIMS for dim in dims):
        return False
    return q.is_cuda and device_of(q).generation == HOPPER and _is_known()


def _is_known() -> bool:
    """Return whether the kernels were tested with this version of Triton."""
    import triton  # pyright: ignore[reportMissingTypeStubs]

    return ".".join(triton.__version__.split(".")[:2]) in KNOWN_VERSIONS


# Dynamo cannot trace into Triton. torch.compiler.assume_constant_result does the same, but imports the compiler.
_is_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _can_copy(x: Tensor) -> bool:
    """Return whether rows have a known dimension, and begin at multiples of 16 bytes, the unit of a copy.

    Of strides Triton asks for multiples of 16 numbers. The offsets of the rows of a tile have 32 bits.
    """
    batch, head, row, _ = x.stride()
    aligned = (x.storage_offset() | batch | head | row) % ALIGNMENT == 0
    return aligned and x.shape[-1] in DIMS and row < 2**31 // ROWS
