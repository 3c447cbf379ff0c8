"""Tiles of the window in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexnsa.attention.tiles.device import Device


@dataclass(frozen=True, slots=True)
class WindowTiles:
    """How a kernel of the window is cut: queries and keys of a tile, warps of a program, tiles in flight."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Give what a launch is told."""
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.num_warps, "num_stages": self.num_stages}


def window_forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int) -> WindowTiles:
    """Choose the tiles of the window's forward pass."""
    if _is_large(device, dtype, dk, dv):
        return WindowTiles(32, 32, 4, 1)
    return WindowTiles(64, 64, 4, 3) if max(dk, dv) > 64 else WindowTiles(128, 64, 8, 3)


def window_backward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int) -> tuple[WindowTiles, WindowTiles]:
    """Choose the tiles for the gradient of queries, and for those of keys."""
    if _is_large(device, dtype, dk, dv):
        return WindowTiles(32, 32, 4, 1), WindowTiles(32, 32, 4, 1)
    of_keys = WindowTiles(64, 64, 4, 2) if max(dk, dv) > 64 else WindowTiles(32, 128, 4, 3)
    return WindowTiles(64, 64, 4, 2), of_keys


def _is_large(device: Device, dtype: torch.dtype, dk: int, dv: int) -> bool:
    """Tell whether tiles of 128 rows would not fit the registers, or the shared memory."""
    return dtype == torch.float32 or max(dk, dv) > 128 or device.shared_memory < 128 * 3 * (dk + dv)
