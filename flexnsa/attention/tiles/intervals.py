"""Tiles of the window in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexnsa.attention.tiles.device import Device, padded


@dataclass(frozen=True, slots=True)
class WindowTiles:
    """Launch parameters of a kernel of the window: queries and keys per tile, warps per program, stages."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return the keyword arguments of a launch."""
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.num_warps, "num_stages": self.num_stages}


def window_forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int) -> WindowTiles:
    """Return the first tiles of the window's forward pass that fit.

    Raises:
        ValueError: none fit.
    """
    candidates = [WindowTiles(32, 32, 4, 1), WindowTiles(16, 16, 4, 1)]
    if dtype != torch.float32 and max(dk, dv) <= 128:
        wide = max(dk, dv) > 64
        stages = (WindowTiles(64, 64, 4, n) if wide else WindowTiles(128, 64, 8, n) for n in (3, 2))
        candidates = [*stages, *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv)


def window_backward_tiles(
    device: Device, dtype: torch.dtype, dk: int, dv: int, *, placed: bool
) -> tuple[WindowTiles, WindowTiles]:
    """Return the first tiles that fit, for the gradient of queries and for the gradients of keys.

    Triton 3.7 cannot pipeline the positions of ``placed`` queries, which the second kernel reads in its loop.

    Raises:
        ValueError: none fit.
    """
    of_queries = [WindowTiles(32, 32, 4, 1), WindowTiles(16, 16, 4, 1)]
    of_keys = of_queries
    if dtype != torch.float32 and max(dk, dv) <= 128:
        wide = max(dk, dv) > 64
        of_keys = [WindowTiles(64, 64, 4, 2) if wide else WindowTiles(32, 128, 4, 3), *of_keys]
        of_queries = [WindowTiles(64, 64, 4, 2), *of_queries]
    if placed:
        of_keys = [replace(tiles, num_stages=1) for tiles in of_keys]
    return (
        _first_that_fits(of_queries, device, dtype, dk, dv, backward=True),
        _first_that_fits(of_keys, device, dtype, dk, dv, backward=True, keys_stay=True),
    )


def _first_that_fits(
    candidates: Sequence[WindowTiles],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
    *,
    backward: bool = False,
    keys_stay: bool = False,
) -> WindowTiles:
    """Return the first tiles whose staying rows, streaming rows and probabilities fit shared memory together."""
    for tiles in candidates:
        stay, stream = (tiles.keys, tiles.queries) if keys_stay else (tiles.queries, tiles.keys)
        both = padded(dk) + padded(dv)
        numbers = stay * (both if backward else padded(dk)) + device.buffers(tiles.num_stages, dtype) * stream * both
        if (numbers + stay * stream) * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"k_win: impl='triton' expects a tile of keys of {dk} and values of {dv} numbers of {dtype} to fit "
        f"{device.shared_memory} bytes of shared memory, which none does here; use impl='flex'"
    )
