"""When the kernels of :mod:`flexnsa.attention.triton.kernels.hopper` run."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import ALIGNMENT, HOPPER, device_of
from flexnsa.attention.triton.selected_sizes import is_wide

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Versions of Triton with which they were tested, those of PyTorch 2.11 to 2.15: Gluon is experimental."""

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


def joins_window(
    q: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    *others: Tensor,
    block_size: int,
    chunk: int,
    placed: bool,
) -> bool:
    """Return whether kernels compute the window together with sums of the selected branch.

    Args:
        q: queries ``(B, Hq, T, Dk)``.
        k_slc: keys of the selected branch ``(B, Hkv, S, Dk)``.
        v_slc: its values.
        k_win: keys of the window.
        v_win: its values.
        others: what else the kernels read or write of each query.
        block_size: keys of a selected block.
        chunk: the most queries that share lists.
        placed: whether the queries of either branch have positions.
    """
    group = q.shape[1] // k_slc.shape[1]
    wide = any(is_wide(x, group, chunk) for x in (q, *others))
    read = q, k_slc, v_slc, k_win, v_win, *others
    runs = runs_on_hopper(*read, placed=placed, block_size=block_size, group=group, wide=wide)
    return runs and k_slc.shape[2] == k_win.shape[2]


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
    """Return whether the kernels were tested with this version of Triton; warn where they were not."""
    import triton  # pyright: ignore[reportMissingTypeStubs]

    known = ".".join(triton.__version__.split(".")[:2]) in KNOWN_VERSIONS
    if not known:
        message = f"triton: expected {' or '.join(KNOWN_VERSIONS)} for the kernels of Hopper GPUs, got"
        slower = "the other kernels run, whose backward pass takes about 1.4 times as long"
        warnings.warn(
            f"{message} {triton.__version__}; {slower}", stacklevel=1
        )  # of this line, so that it is shown once
    return known


# Dynamo cannot trace into Triton. torch.compiler.assume_constant_result does the same, but imports the compiler.
_is_known._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _can_copy(x: Tensor) -> bool:
    """Return whether rows have a known dimension, and begin at multiples of 16 bytes, the unit of a copy.

    Of strides Triton asks for multiples of 16 numbers. The offsets of the rows of a tile have 32 bits.
    """
    batch, head, row, _ = x.stride()
    aligned = (x.storage_offset() | batch | head | row) % ALIGNMENT == 0
    return aligned and x.shape[-1] in DIMS and row < 2**31 // ROWS
