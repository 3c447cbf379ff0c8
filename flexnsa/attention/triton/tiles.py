"""Which tiles a device runs the selected branch with: the one place that knows devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut.

    Args:
        rows: (query, head) rows that meet a tile of keys at a time.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        max_registers: registers of a thread, where the compiler is to use fewer than it would.
        halve: whether keys are kept in two halves of their columns, which lets accumulators be smaller.
        second_rows: rows that a program of the second pass joins.
    """

    rows: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    halve: bool = False
    second_rows: int = 16

    def of_group(self, group: int) -> dict[str, int]:
        """Give the rows as the queries of a tile, and the tiles that the heads of one query are spread over."""
        return {"BM": self.rows, "QUERIES": max(1, self.rows // group), "SPREAD": -(-group // self.rows)}

    def limit(self) -> dict[str, Any]:
        """Give the launch option that limits registers, if any."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


def launch(kernel: Any, grid: Sequence[Any]) -> Any:
    """Give the launcher of a kernel over a grid of programs, which a type checker takes for what the kernel is."""
    return kernel[grid]


def padded(size: int) -> int:
    """Round up to what a product can be wide."""
    return max(16, 1 << (size - 1).bit_length())


def columns(dim: int, *, halve: bool) -> tuple[int, int]:
    """Cut ``dim`` columns into two powers of two, the second 0 where one is enough, so that 192 is 128 + 64."""
    whole = padded(dim)
    if whole == 16 or (whole == dim and not halve):
        return whole, 0
    return whole // 2, padded(dim - whole // 2)


def shared_memory(device: torch.device) -> int:
    """Give the bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return 227 * 1024  # the interpreter has no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def forward_tiles(dtype: torch.dtype, dk: int, dv: int, block_size: int, shared: int) -> Tiles:
    """Choose the tiles of the forward pass."""
    if dtype == torch.float32:
        return Tiles(32, 4, 1)
    return Tiles(64, 4, 2, 168)


def backward_tiles(dtype: torch.dtype, dk: int, dv: int, block_size: int, shared: int) -> Tiles:
    """Choose the tiles of the backward pass."""
    if dtype == torch.float32:
        return Tiles(32, 4, 1, halve=True)
    return Tiles(64, 4, 2, halve=True)
