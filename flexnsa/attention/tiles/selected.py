"""Tiles of the selected branch in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexnsa.attention.tiles.device import BLACKWELL, HOPPER, Device, padded


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

    def launch_options(self) -> dict[str, object]:
        """Give warps, stages, the limit of registers if there is one, and what the cache is asked to do."""
        options: dict[str, object] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["EVICTION"] = "evict_first" if self.stream else ""
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def columns(dim: int, *, halve: bool) -> tuple[int, int]:
    """Cut ``dim`` columns into two powers of two, the second 0 where one is enough, so that 192 is 128 + 64."""
    whole = padded(dim)
    if whole == 16 or (whole == dim and not halve):
        return whole, 0
    return whole // 2, padded(dim - whole // 2)


def forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, block_size: int) -> Tiles:
    """Choose the tiles of the forward pass: the first that fit.

    Raises:
        ValueError: none fit.
    """
    candidates = [Tiles(16, 4, 1)]
    if dtype != torch.float32:
        # On Hopper fewer registers than the compiler would take leave room for a third program, and nothing spills.
        limit = 168 if device.generation == HOPPER and max(dk, dv) <= 128 and block_size <= 64 else None
        candidates = [Tiles(64, 4, 2, limit), Tiles(64, 4, 1, limit), Tiles(32, 4, 1), *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv, block_size, streams=(dk,))


def backward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, block_size: int) -> Tiles:
    """Choose the tiles of the backward pass: the first that fit.

    Raises:
        ValueError: none fit.
    """
    sums = padded(block_size) * (sum(columns(dk, halve=True)) + padded(dv))
    asynchronous = device.generation >= HOPPER and dtype != torch.float32
    # Of dk and dv a thread holds at most 128 numbers, or 64 where products take their operands from registers.
    warps = min(16, max(4, padded(-(-sums // (4096 if asynchronous else 2048)), least=1)))
    candidates = [Tiles(16, warps, 1, halve=True)]
    if dtype != torch.float32:
        candidates = [Tiles(32, warps, 2, halve=True), Tiles(32, warps, 1, halve=True), *candidates]
    # 64 rows and this much beside them are more than Blackwell's tensor memory, and are compiled to nothing at all.
    if asynchronous and (device.generation == HOPPER or sums <= 64 * 320):
        candidates = [Tiles(64, warps, 2, halve=True), Tiles(64, warps, 1, halve=True), *candidates]
    if asynchronous and device.generation == HOPPER and sums <= 64 * 128:
        candidates = [Tiles(128, warps, 2, halve=True), *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv, block_size, streams=(dk, dv))


def _first_that_fits(
    candidates: list[Tiles],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
    block_size: int,
    streams: Sequence[int],
) -> Tiles:
    """Count keys, values, the rows in flight and a tile of probabilities, all of which may lie in shared memory."""
    keys = padded(block_size)
    key_columns = sum(columns(dk, halve=True)) + padded(dv)
    row_columns = sum(sum(columns(dim, halve=True)) for dim in streams)
    # What is compiled for Blackwell keeps transposed operands there as well.
    spare = 1.5 if device.generation >= BLACKWELL and dtype != torch.float32 else 1.0
    for tiles in candidates:
        numbers = keys * key_columns + tiles.rows * (keys + tiles.num_stages * row_columns)
        if spare * numbers * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"k: impl='triton' expects blocks of {block_size} keys of {dk} and values of {dv} numbers of {dtype} to fit "
        f"{device.shared_memory} bytes of shared memory, which they do not here; use impl='flex'"
    )
