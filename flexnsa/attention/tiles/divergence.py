"""Tiles of the kernels of the selection loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexnsa.attention.tiles.device import Device, padded


@dataclass(frozen=True, slots=True)
class DivergenceTiles:
    """Launch parameters of a kernel of the selection loss: queries and keys of a tile, warps of a program, stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a launch that are no sizes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def divergence_tiles(device: Device, dtype: torch.dtype, head_dim: int) -> DivergenceTiles:
    """Return the first tiles of which one of queries, those of keys and one of their scores fit shared memory.

    In 16 bits they are the fastest of 9 on an H200.

    Raises:
        ValueError: none fit.
    """
    candidates = [DivergenceTiles(32, 32, 4, 1), DivergenceTiles(16, 16, 4, 1)]
    if dtype != torch.float32 and head_dim <= 128:
        warps, stages = (4, 3) if head_dim <= 64 else (8, 2)
        candidates = [DivergenceTiles(64, 64, warps, stages), *candidates]
    for tiles in candidates:
        rows = tiles.queries + max(2, tiles.num_stages) * tiles.keys
        if (rows * padded(head_dim) + tiles.queries * tiles.keys) * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"q: expected 48 rows of {head_dim} numbers of {dtype} to fit {device.shared_memory} bytes of shared memory, "
        "which they do not here"
    )
