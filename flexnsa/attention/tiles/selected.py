"""Tiles of the selected branch in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from flexnsa.attention.tiles.device import BLACKWELL, HOPPER, Device, Tiles, first_that_fits, padded


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
