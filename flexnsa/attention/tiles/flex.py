"""Tiles of FlexAttention's kernels.

FlexAttention's own choices cover some head dimensions of some devices, and others may not fit. Here each generation has
preferred tiles, and a device with too little shared memory gets the next smaller tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from flexnsa.attention.tiles.device import AMPERE, BLACKWELL, HOPPER, Device, first_that_fits, padded

KernelOptions = Mapping[str, str | int | bool]
"""FlexAttention's options for tiles, warps and stages."""


class Tile(NamedTuple):
    """Rows of queries, keys per iteration, and how many such key tiles are loaded ahead."""

    rows: int
    keys: int
    stages: int


FORWARD: Mapping[tuple[int, int], Mapping[int, Tile]] = {
    (AMPERE, 2): {64: Tile(128, 64, 3), 128: Tile(128, 64, 3), 256: Tile(64, 32, 3)},
    (AMPERE, 4): {64: Tile(128, 32, 3), 128: Tile(128, 32, 3), 256: Tile(64, 16, 3)},
    (HOPPER, 2): {64: Tile(128, 128, 3), 128: Tile(128, 64, 3), 256: Tile(64, 32, 3)},
    (HOPPER, 4): {64: Tile(128, 32, 3), 128: Tile(32, 64, 3), 256: Tile(32, 32, 3)},
    (BLACKWELL, 2): {64: Tile(128, 128, 3), 128: Tile(128, 64, 3), 192: Tile(128, 128, 1), 256: Tile(64, 32, 3)},
    (BLACKWELL, 4): {64: Tile(128, 32, 3), 128: Tile(32, 64, 3), 192: Tile(32, 64, 2), 256: Tile(32, 32, 3)},
}
"""Preferred tiles by (generation, bytes per element), then by head dimension of the keys; else ``OTHER``."""
OTHER = Tile(64, 64, 3)
SMALLER = {
    2: (Tile(128, 64, 2), Tile(64, 64, 2), Tile(64, 32, 2), Tile(32, 32, 2), Tile(32, 16, 2), Tile(16, 16, 1)),
    4: (Tile(32, 32, 2), Tile(32, 16, 2), Tile(16, 16, 1)),
}
"""Smaller tiles by bytes per element. In float32, larger tiles spill kilobytes of registers."""

NARROW_BACKWARD = Tile(64, 32, 3)
"""For 16-bit heads up to 128, where FlexAttention's own tiles spill registers."""
WIDE_BACKWARD = {AMPERE: Tile(64, 64, 2), HOPPER: Tile(64, 64, 2), BLACKWELL: Tile(64, 64, 1)}
SMALLER_BACKWARD = (Tile(64, 64, 1), Tile(64, 32, 1), Tile(32, 32, 1), Tile(16, 16, 1))


def dense_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, stages: int = 3) -> KernelOptions:
    """Return the tiles for masks with tiles of 128; ``stages`` are those of narrow heads in backward.

    Raises:
        ValueError: none fit the device.
    """
    size, generation = dtype.itemsize, device.generation
    narrow = size == 2 and max(dk, dv) <= 128
    preferred = FORWARD[generation, size].get(dk, OTHER)
    forward = _first_that_fits((preferred, *SMALLER[size]), _forward_bytes, device, dtype, dk, dv)
    if size > 2:
        preferred = SMALLER_BACKWARD[-1]
    else:
        preferred = NARROW_BACKWARD._replace(stages=stages) if narrow else WIDE_BACKWARD[generation]
    backward = _first_that_fits((preferred, *SMALLER_BACKWARD), _backward_bytes, device, dtype, dk, dv)
    warps = 8 if forward.rows >= (64 if narrow else 128) and size == 2 else 4
    return _options(forward, warps, backward, 4)


def sparse_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, rows: int, keys: int) -> KernelOptions:
    """Return the tiles for masks with tiles of ``rows`` by ``keys``, as measured on an H200.

    Many programs of one warp are faster than a few large ones. 4-byte elements need more registers, so more warps.

    Raises:
        ValueError: none fit the device.
    """
    warps = 1 if dtype.itemsize == 2 else 4
    forward = _first_that_fits(_within(rows, keys), _forward_bytes, device, dtype, dk, dv)
    backward = _first_that_fits((Tile(16, 16, 3), Tile(16, 16, 1)), _backward_bytes, device, dtype, dk, dv)
    return _options(forward, warps, backward, warps)


def decoding_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, rows: int, keys: int) -> KernelOptions:
    """Return the tiles of the kernel for few queries, for masks with tiles of ``rows`` by ``keys``.

    Raises:
        ValueError: none fit the device.
    """
    tile = _first_that_fits(_within(rows, keys), _forward_bytes, device, dtype, dk, dv)
    return {"BLOCK_M": rows, "BLOCK_N": tile.keys, "num_warps": 4, "num_stages": tile.stages}


def _options(forward: Tile, forward_warps: int, backward: Tile, backward_warps: int) -> KernelOptions:
    """Return options; ``rows`` of backward are what stays (keys for dk and dv, queries for dq), ``keys`` stream."""
    (rows, keys, stages), (stay, stream, backward_stages) = forward, backward
    sizes = {"fwd_BLOCK_M": rows, "fwd_BLOCK_N": keys, "fwd_num_warps": forward_warps, "fwd_num_stages": stages}
    sizes |= {"bwd_BLOCK_N1": stay, "bwd_BLOCK_M1": stream, "bwd_BLOCK_M2": stay, "bwd_BLOCK_N2": stream}
    return sizes | {"bwd_num_warps": backward_warps, "bwd_num_stages": backward_stages}


def _within(rows: int, keys: int) -> tuple[Tile, ...]:
    """Return tiles of powers of two that divide ``rows`` and ``keys``, the largest first."""
    rows, widest = rows & -rows, min(keys & -keys, 64)
    widths = [widest, *(width for width in (32, 16) if width < widest)]
    return tuple(Tile(rows, width, stages) for stages in (2, 1) for width in widths)


def _forward_bytes(tile: Tile, device: Device, dtype: torch.dtype, dk: int, dv: int) -> int:
    """Return the shared memory of queries, staged keys and values, and in float32 probabilities, in bytes."""
    numbers = tile.rows * padded(dk) + device.buffers(tile.stages, dtype) * tile.keys * (padded(dk) + padded(dv))
    probabilities = tile.rows * tile.keys if dtype.itemsize > 2 else 0
    return (numbers + probabilities) * dtype.itemsize


def _backward_bytes(tile: Tile, device: Device, dtype: torch.dtype, dk: int, dv: int) -> int:
    """Return the shared memory of the tile that stays and of the tiles that stream, in bytes."""
    rows = tile.rows + device.buffers(tile.stages, dtype) * tile.keys
    return rows * (padded(dk) + padded(dv)) * dtype.itemsize


def _first_that_fits(
    candidates: Sequence[Tile],
    bytes_of: Callable[[Tile, Device, torch.dtype, int, int], int],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
) -> Tile:
    error = f"k: impl='flex' expects a tile of keys of {dk} and values of {dv} numbers of {dtype} to fit"
    # 1024 for sums and other small buffers
    return first_that_fits(candidates, lambda tile: bytes_of(tile, device, dtype, dk, dv) + 1024, device, error)
