"""Tiles of the selected branch in Triton, and upper bounds of its lists (``triton/kernels/selected_lists.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import BLACKWELL, HOPPER, Device, Tiles, first_that_fits, padded

SLOTS = 4
"""Rows of partial results that a thread of a Gluon kernel loads at a time."""
SUM_ROWS = 16
"""(Query, head) rows of a program that adds up the partial results of a query's blocks."""
Part = tuple[slice, slice]
"""Some batch elements, or some heads of one."""


def of_group(tiles: Tiles, group: int) -> dict[str, int]:
    """Return the (query, head) rows and the queries of a tile, and the tiles that the heads of one query need."""
    return {"BM": tiles.queries, "QUERIES": max(1, tiles.queries // group), "SPREAD": -(-group // tiles.queries)}


def columns(dim: int, *, halve: bool) -> tuple[int, int]:
    """Split ``dim`` columns into two powers of two, for example 192 into 128 + 64; the second is 0 if one suffices."""
    whole = padded(dim)
    if whole == 16 or (whole == dim and not halve):
        return whole, 0
    return whole // 2, padded(dim - whole // 2)


@cache
def forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, block_size: int) -> Tiles:
    """Return the first tiles of the forward pass that fit.

    Raises:
        ValueError: none fit.
    """
    keys = padded(block_size)
    candidates = [Tiles(16, keys, 4, 1)]
    if dtype != torch.float32:
        candidates = [Tiles(64, keys, 4, 2), Tiles(64, keys, 4, 1), Tiles(32, keys, 4, 1), *candidates]
        if device.generation == HOPPER and max(dk, dv) <= 128 and block_size <= 64:
            candidates = [Tiles(128, keys, 4, 2), *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv, block_size, streams=(dk,))


@cache
def backward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, block_size: int) -> Tiles:
    """Return the first tiles of the backward pass that fit.

    Raises:
        ValueError: none fit.
    """
    keys = padded(block_size)
    sums = keys * (sum(columns(dk, halve=True)) + padded(dv))
    asynchronous = device.generation >= HOPPER and dtype != torch.float32
    # A thread holds at most 128 elements of dk and dv, or 64 where products read their operands from registers.
    warps = min(16, max(4, padded(-(-sums // (4096 if asynchronous else 2048)), least=1)))
    candidates = [Tiles(16, keys, warps, 1)]
    if dtype != torch.float32:
        candidates = [Tiles(32, keys, warps, 2), Tiles(32, keys, warps, 1), *candidates]
    # 64 rows with larger sums exceed Blackwell's tensor memory and do not compile.
    if asynchronous and (device.generation == HOPPER or sums <= 64 * 320):
        candidates = [Tiles(64, keys, warps, 2), Tiles(64, keys, warps, 1), *candidates]
    if asynchronous and device.generation == HOPPER and sums <= 64 * 128:
        candidates = [Tiles(128, keys, warps, 2), *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv, block_size, streams=(dk, dv))


@cache
def gathered_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, group: int) -> Tiles:
    """Return the first tiles that fit of the kernels that gather the keys of a query; all heads are rows of one tile.

    Raises:
        ValueError: none fit.
    """
    rows, columns = padded(group), padded(dk) + padded(dv)
    candidates = [Tiles(rows, keys, 4, stages) for keys, stages in ((64, 2), (32, 2), (32, 1), (16, 1))]
    error = f"k: impl='triton' expects the queries of {group} heads, and tiles of {dtype} keys and values, to fit"

    def bytes_of(tiles: Tiles) -> int:
        return (rows * (columns + tiles.keys) + tiles.num_stages * tiles.keys * columns) * dtype.itemsize

    return first_that_fits(candidates, bytes_of, device, error)


def _first_that_fits(
    candidates: Sequence[Tiles],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
    block_size: int,
    streams: Sequence[int],
) -> Tiles:
    """Return the first tiles whose keys, values, staged rows and probabilities fit shared memory together."""
    key_columns = sum(columns(dk, halve=True)) + padded(dv)
    row_columns = sum(sum(columns(dim, halve=True)) for dim in streams)
    # Code for Blackwell also stores transposed operands there.
    spare = 1.5 if device.generation >= BLACKWELL and dtype != torch.float32 else 1.0

    def bytes_of(tiles: Tiles) -> float:
        numbers = tiles.keys * key_columns + tiles.queries * (tiles.keys + tiles.num_stages * row_columns)
        return spare * numbers * dtype.itemsize

    error = f"k: impl='triton' expects blocks of {block_size} keys of {dk} and values of {dv} numbers of {dtype} to fit"
    return first_that_fits(candidates, bytes_of, device, error)


def is_whole(part: Part, x: Tensor) -> bool:
    """Return whether a part of ``x (B, H, ...)`` is all of it."""
    return part == (slice(0, x.shape[0]), slice(0, x.shape[1]))


def num_key_tiles(num_keys: int, block_size: int, *, has_positions: bool) -> int:
    """Return the number of key tiles that ``num_keys`` keys may need; documents may start before the first key."""
    runs = (num_keys + block_size - 1) // block_size
    return 2 * (runs + 1) if has_positions else runs


def max_replicas(key_tiles: int, num_pairs: int, capacity: int) -> int:
    """Return an upper bound of the replicas of a chunk: one partial per key tile, and the full ones that pairs fill."""
    return key_tiles + num_pairs // capacity


def max_shared(num_pairs: int, capacity: int) -> int:
    """Return an upper bound of the replicas of tiles with several: all but one of a tile are full, so at least half."""
    return max(1, 2 * (num_pairs // capacity))
