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
        stream: whether partial rows ask the cache not to keep them, so that queries stay there.
    """

    rows: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    halve: bool = False
    second_rows: int = 16
    stream: bool = False

    def of_group(self, group: int) -> dict[str, int]:
        """Give the rows as the queries of a tile, and the tiles that the heads of one query are spread over."""
        return {"BM": self.rows, "QUERIES": max(1, self.rows // group), "SPREAD": -(-group // self.rows)}

    def launch_options(self) -> dict[str, Any]:
        """Give warps, stages, the limit of registers if there is one, and what the cache is asked to do."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options |= {"EVICTION": "evict_first" if self.stream else ""}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


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
    """Give the bytes of shared memory of one program: 163 KiB on an A100, 99 on an RTX 4090, 227 on an H200."""
    if device.type != "cuda":
        return 227 * 1024  # the interpreter knows no limit
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def forward_tiles(dtype: torch.dtype, dk: int, dv: int, block_size: int, shared: int) -> Tiles:
    """Choose the tiles of the forward pass: the first that fit.

    Raises:
        ValueError: none fit ``shared`` bytes.
    """
    if dtype == torch.float32:
        candidates = [Tiles(32, 4, 1), Tiles(16, 4, 1)]
    else:
        limit = 168 if dv <= 128 and block_size <= 64 else None  # leaves room for three programs, spills nothing
        candidates = [Tiles(64, 4, 2, limit), Tiles(64, 4, 1), Tiles(32, 4, 1), Tiles(16, 4, 1)]
    return _first_that_fits(candidates, dtype, dk, dv, block_size, shared, streams=(dk,))


def backward_tiles(dtype: torch.dtype, dk: int, dv: int, block_size: int, shared: int) -> Tiles:
    """Choose the tiles of the backward pass: the first that fit.

    Raises:
        ValueError: none fit ``shared`` bytes.
    """
    sums = padded(block_size) * (sum(columns(dk, halve=True)) + padded(dv))
    warps = max(4, min(16, sums // 4096))  # sums of dk and dv take at most 128 registers of a thread
    if dtype == torch.float32:
        candidates = [Tiles(32, warps, 1, halve=True), Tiles(16, warps, 1, halve=True)]
    else:
        candidates = [Tiles(rows, warps, stages, halve=True) for rows, stages in ((64, 2), (64, 1), (32, 1), (16, 1))]
        if sums <= 64 * 128:
            candidates.insert(0, Tiles(128, warps, 2, halve=True))
    return _first_that_fits(candidates, dtype, dk, dv, block_size, shared, streams=(dk, dv))


def _first_that_fits(
    candidates: list[Tiles], dtype: torch.dtype, dk: int, dv: int, block_size: int, shared: int, streams: Sequence[int]
) -> Tiles:
    """Count keys, values, the rows in flight and a tile of probabilities, all of which lie in shared memory."""
    keys = padded(block_size)
    for tiles in candidates:
        rows = tiles.rows * (keys + tiles.num_stages * sum(sum(columns(dim, halve=True)) for dim in streams))
        if (keys * (sum(columns(dk, halve=True)) + padded(dv)) + rows) * dtype.itemsize <= shared:
            return tiles
    raise ValueError(
        f"k: impl='triton' expects blocks of {block_size} keys of {dk} and values of {dv} numbers of {dtype} to fit "
        f"{shared} bytes of shared memory, which they do not on this device; use impl='flex'"
    )
