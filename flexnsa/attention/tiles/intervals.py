"""Tiles of the compressed branch and the window in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexnsa.attention.tiles.device import Device, padded


@dataclass(frozen=True, slots=True)
class IntervalTiles:
    """Launch parameters of a kernel: queries and keys per tile, warps per program, stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.num_warps, "num_stages": self.num_stages}


SMALL = (IntervalTiles(32, 32, 4, 1), IntervalTiles(16, 16, 4, 1))
"""For float32, for heads above 128, and where nothing else fits."""


def forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, *, windowed: bool) -> IntervalTiles:
    """Return the first tiles of the forward pass that fit; in a window smaller ones, which exceed it by fewer keys.

    Raises:
        ValueError: none fit.
    """
    candidates = SMALL
    if _are_narrow(dtype, dk, dv):
        wide = max(dk, dv) > 64
        large = (IntervalTiles(128, 128, 8, 2),) if wide else (IntervalTiles(128, 64, 8, 3),)
        candidates = (*(() if windowed else large), IntervalTiles(64, 32, 4, 3), IntervalTiles(64, 32, 4, 2), *SMALL)
    return _first_that_fits(candidates, device, dtype, dk, dv)


def backward_tiles(
    device: Device, dtype: torch.dtype, dk: int, dv: int, *, windowed: bool, placed: bool
) -> tuple[IntervalTiles, IntervalTiles]:
    """Return the first tiles that fit, for the gradient of queries and for the gradients of keys.

    Triton 3.7 cannot pipeline the positions of ``placed`` queries, which the second kernel reads in its loop.

    Raises:
        ValueError: none fit.
    """
    of_queries = of_keys = SMALL
    if _are_narrow(dtype, dk, dv):
        wide = max(dk, dv) > 64
        of_queries = (IntervalTiles(64, 32, 4, 3) if windowed and not wide else IntervalTiles(64, 64, 4, 2), *SMALL)
        of_keys = (IntervalTiles(64 if wide else 32 if windowed else 128, 64, 4, 2), *SMALL)
    if placed:
        of_keys = [replace(tiles, num_stages=1) for tiles in of_keys]
    return (
        _first_that_fits(of_queries, device, dtype, dk, dv, backward=True),
        _first_that_fits(of_keys, device, dtype, dk, dv, backward=True, keys_stay=True),
    )


def _are_narrow(dtype: torch.dtype, dk: int, dv: int) -> bool:
    return dtype != torch.float32 and max(dk, dv) <= 128


def _first_that_fits(
    candidates: Sequence[IntervalTiles],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
    *,
    backward: bool = False,
    keys_stay: bool = False,
) -> IntervalTiles:
    """Return the first tiles whose staying rows, streaming rows and probabilities fit shared memory together."""
    for tiles in candidates:
        stay, stream = (tiles.keys, tiles.queries) if keys_stay else (tiles.queries, tiles.keys)
        both = padded(dk) + padded(dv)
        numbers = stay * (both if backward else padded(dk)) + device.buffers(tiles.num_stages, dtype) * stream * both
        if (numbers + stay * stream) * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"k: impl='triton' expects a tile of keys of {dk} and values of {dv} numbers of {dtype} to fit "
        f"{device.shared_memory} bytes of shared memory, which none does here; use impl='flex'"
    )
