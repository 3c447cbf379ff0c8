"""Tiles of the kernels that score blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from flexnsa.attention.tiles.device import HOPPER, Device, padded

MOST_KEYS = 256
"""Keys of a tile of the importance kernel in 16 bits, at most, if 16 blocks have no more."""


@dataclass(frozen=True, slots=True)
class ImportanceTiles:
    """Launch parameters of the importance kernel: queries and blocks of one program, warps, stages of the q loads.

    ``places`` is of the kernel for Hopper alone: keys of each block in a product.
    """

    queries: int
    blocks: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    places: int = 2

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        options = {"BLOCK_T": self.queries, "BLOCK_J": self.blocks}
        options |= {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


@cache
def importance_tiles(device: Device, dtype: torch.dtype, head_dim: int, keys_of_block: int) -> ImportanceTiles:
    """Return tiles whose keys and queries fit shared memory together; in 16 bits the fastest of 12 on an H200.

    Raises:
        ValueError: none fit the device.
    """
    candidates = [
        ImportanceTiles(queries=32, blocks=16, num_warps=4, num_stages=2),
        *(ImportanceTiles(queries=16, blocks=blocks, num_warps=4, num_stages=1) for blocks in (16, 8)),
    ]
    if dtype != torch.float32 and head_dim <= 128:
        widths = [blocks for blocks in (64, 32, 16) if blocks * keys_of_block <= MOST_KEYS or blocks == 16]
        # This limit spills registers, but lets a multiprocessor of Hopper run four programs: 0.31 ms instead of 0.35.
        limit = 128 if device.generation == HOPPER and head_dim <= 64 and keys_of_block == 8 else None
        candidates = [*(ImportanceTiles(64, blocks, 4, 1, limit) for blocks in widths), *candidates]
    for tiles in candidates:
        rows = tiles.blocks * keys_of_block + tiles.queries * tiles.num_stages
        if rows * padded(head_dim) * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"q: expected {8 * keys_of_block} compressed keys of {head_dim} numbers of {dtype}, those of 8 selection "
        f"blocks, to fit {device.shared_memory} bytes of shared memory, which they do not here"
    )


HOPPER_IMPORTANCE: Mapping[tuple[int, int], ImportanceTiles] = {
    (64, 4): ImportanceTiles(64, 32, 4, 1, 128),
    (128, 4): ImportanceTiles(64, 32, 4, 1, 168),
    (64, 8): ImportanceTiles(64, 16, 4, 1, 128, places=4),
    (128, 8): ImportanceTiles(64, 32, 4, 1, places=4),
}
"""Those of the kernel for Hopper, by head dimension and keys of a block: 2 to 4 programs share a multiprocessor."""


@dataclass(frozen=True, slots=True)
class LogSumExpTiles:
    """Launch parameters of the log-sum-exp kernel: queries and keys of one program, and warps; two stages."""

    queries: int
    keys: int
    num_warps: int


@cache
def log_sum_exp_tiles(device: Device, dtype: torch.dtype, head_dim: int) -> LogSumExpTiles:
    """Return tiles of which one of queries and two of keys fit shared memory; in 16 bits the fastest of 6 on an H200.

    Raises:
        ValueError: none fit the device.
    """
    wide = dtype == torch.float32 or padded(head_dim) > 128
    candidates = [LogSumExpTiles(32, 32, 4), LogSumExpTiles(16, 16, 4)]
    for tiles in candidates if wide else [LogSumExpTiles(128, 64, 4), LogSumExpTiles(64, 64, 4), *candidates]:
        if (tiles.queries + 2 * tiles.keys) * padded(head_dim) * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"q: expected 48 rows of {head_dim} numbers of {dtype} to fit {device.shared_memory} bytes of shared memory, "
        "which they do not here"
    )
