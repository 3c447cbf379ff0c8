"""Tiles of the kernels that score blocks and of the selection loss: queries, and blocks or keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from flexnsa.attention.tiles.device import HOPPER, Device, Tiles, first_that_fits, padded


@cache
def importance_tiles(device: Device, dtype: torch.dtype, head_dim: int, keys_of_block: int) -> Tiles:
    """Return tiles whose keys and queries fit shared memory together; in 16 bits the fastest of 12 on an H200.

    Raises:
        ValueError: none fit the device.
    """
    candidates = [Tiles(32, 16, 4, 2), Tiles(16, 16, 4, 1), Tiles(16, 8, 4, 1)]
    if dtype != torch.float32 and head_dim <= 128:
        widths = [blocks for blocks in (64, 32, 16) if blocks * keys_of_block <= 256 or blocks == 16]
        # This limit spills registers, but lets a multiprocessor of Hopper run four programs: 0.31 ms instead of 0.35.
        limit = 128 if device.generation == HOPPER and head_dim <= 64 and keys_of_block == 8 else None
        candidates = [*(Tiles(64, blocks, 4, 1, limit) for blocks in widths), *candidates]

    def bytes_of(tiles: Tiles) -> int:
        return (tiles.keys * keys_of_block + tiles.queries * tiles.num_stages) * padded(head_dim) * dtype.itemsize

    error = f"q: expected {8 * keys_of_block} compressed keys of {head_dim} numbers of {dtype}, of 8 blocks, to fit"
    return first_that_fits(candidates, bytes_of, device, error)


HOPPER_IMPORTANCE: Mapping[tuple[int, int], Tiles] = {
    (64, 4): Tiles(64, 32, 4, 1, 128),
    (128, 4): Tiles(64, 32, 4, 1, 168),
    (64, 8): Tiles(64, 16, 4, 1, 128),
    (128, 8): Tiles(64, 32, 4, 1),
}
"""Those of the kernel for Hopper, by head dimension and keys of a block: 2 to 4 programs share a multiprocessor."""


@cache
def log_sum_exp_tiles(device: Device, dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return tiles of which one of queries and two of keys fit shared memory; in 16 bits the fastest of 6 on an H200.

    Raises:
        ValueError: none fit the device.
    """
    wide = dtype == torch.float32 or padded(head_dim) > 128
    candidates = [Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 2)]
    candidates = candidates if wide else [Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2), *candidates]

    def bytes_of(tiles: Tiles) -> int:
        return (tiles.queries + 2 * tiles.keys) * padded(head_dim) * dtype.itemsize

    return first_that_fits(candidates, bytes_of, device, f"q: expected 48 rows of {head_dim} numbers of {dtype} to fit")


@cache
def product_tiles(device: Device, dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return tiles of which one of queries and the staged ones of keys fit shared memory; the fastest of 9 on an H200.

    Raises:
        ValueError: none fit the device.
    """
    candidates = [Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1)]
    if dtype != torch.float32:
        candidates = [Tiles(128, 128, 4, 3), Tiles(64, 64, 4, 2), *candidates]

    def bytes_of(tiles: Tiles) -> int:
        rows = tiles.queries + tiles.num_stages * tiles.keys
        return rows * padded(head_dim) * dtype.itemsize + 4 * tiles.queries * tiles.keys

    return first_that_fits(candidates, bytes_of, device, f"q: expected 32 rows of {head_dim} numbers of {dtype} to fit")


def selection_loss_tiles(device: Device, dtype: torch.dtype, head_dim: int) -> Tiles:
    """Return tiles of which one of queries, those of keys and one of their scores fit; the fastest of 9 on an H200.

    Raises:
        ValueError: none fit.
    """
    candidates = [Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1)]
    if dtype != torch.float32 and head_dim <= 128:
        warps, stages = (4, 3) if head_dim <= 64 else (8, 2)
        candidates = [Tiles(64, 64, warps, stages), *candidates]

    def bytes_of(tiles: Tiles) -> int:
        rows = tiles.queries + max(2, tiles.num_stages) * tiles.keys
        return (rows * padded(head_dim) + tiles.queries * tiles.keys) * dtype.itemsize

    return first_that_fits(candidates, bytes_of, device, f"q: expected 48 rows of {head_dim} numbers of {dtype} to fit")
