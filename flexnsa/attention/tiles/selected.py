"""Tiles of the selected branch in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from flexnsa.attention.tiles.device import BLACKWELL, HOPPER, Device, padded


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters of a kernel.

    Args:
        rows: (query, head) rows per iteration.
        num_warps: warps per program.
        num_stages: tiles that are loaded ahead.
        max_registers: limit of registers per thread, where it is below the compiler's choice.
        halve: whether the columns of keys are split into two halves, for smaller accumulators.
        second_rows: rows per program of the second pass.
        stream: whether partial outputs are evicted from the cache first, so that queries stay there.
    """

    rows: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    halve: bool = False
    second_rows: int = 16
    stream: bool = False

    def of_group(self, group: int) -> dict[str, int]:
        """Return the queries per tile, and the number of tiles that the heads of one query need."""
        return {"BM": self.rows, "QUERIES": max(1, self.rows // group), "SPREAD": -(-group // self.rows)}

    def launch_options(self) -> dict[str, object]:
        """Return warps, stages, the eviction policy, and the limit of registers if there is one."""
        options: dict[str, object] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options["EVICTION"] = "evict_first" if self.stream else ""
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


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
    candidates = [Tiles(16, 4, 1)]
    if dtype != torch.float32:
        candidates = [Tiles(64, 4, 2), Tiles(64, 4, 1), Tiles(32, 4, 1), *candidates]
        if device.generation == HOPPER and max(dk, dv) <= 128 and block_size <= 64:
            candidates = [Tiles(128, 4, 2), *candidates]
    return _first_that_fits(candidates, device, dtype, dk, dv, block_size, streams=(dk,))


@cache
def backward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, block_size: int) -> Tiles:
    """Return the first tiles of the backward pass that fit.

    Raises:
        ValueError: none fit.
    """
    sums = padded(block_size) * (sum(columns(dk, halve=True)) + padded(dv))
    asynchronous = device.generation >= HOPPER and dtype != torch.float32
    # A thread holds at most 128 elements of dk and dv, or 64 where products read their operands from registers.
    warps = min(16, max(4, padded(-(-sums // (4096 if asynchronous else 2048)), least=1)))
    candidates = [Tiles(16, warps, 1, halve=True)]
    if dtype != torch.float32:
        candidates = [Tiles(32, warps, 2, halve=True), Tiles(32, warps, 1, halve=True), *candidates]
    # 64 rows with larger sums exceed Blackwell's tensor memory and do not compile.
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
    """Return the first tiles whose keys, values, staged rows and probabilities fit shared memory together."""
    keys = padded(block_size)
    key_columns = sum(columns(dk, halve=True)) + padded(dv)
    row_columns = sum(sum(columns(dim, halve=True)) for dim in streams)
    # Code for Blackwell also stores transposed operands there.
    spare = 1.5 if device.generation >= BLACKWELL and dtype != torch.float32 else 1.0
    for tiles in candidates:
        numbers = keys * key_columns + tiles.rows * (keys + tiles.num_stages * row_columns)
        if spare * numbers * dtype.itemsize <= device.shared_memory:
            return tiles
    raise ValueError(
        f"k: impl='triton' expects blocks of {block_size} keys of {dk} and values of {dv} numbers of {dtype} to fit "
        f"{device.shared_memory} bytes of shared memory, which they do not here; use impl='flex'"
    )
