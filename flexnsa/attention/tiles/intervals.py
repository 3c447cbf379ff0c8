"""Tiles of the compressed branch and the window in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from flexnsa.attention.tiles.device import Device, Tiles, first_that_fits, padded

Key = tuple[int, bool]
"""Upper bound of the head dimensions, and whether there is a window."""

FORWARD = {False: Tiles(128, 64, 8, 3), True: Tiles(64, 32, 4, 3)}
"""The fastest tiles in 16 bits on an H200. A window prefers small tiles, which read fewer keys outside it."""
OF_QUERIES = {64: Tiles(64, 32, 4, 3), 128: Tiles(64, 64, 4, 2)}
"""The same for the gradient of queries, with a window and without."""
OF_KEYS: Mapping[Key, Tiles] = {
    (64, False): Tiles(128, 64, 4, 2),
    (64, True): Tiles(64, 64, 4, 2),
    (128, False): Tiles(64, 128, 8, 2),
    (128, True): Tiles(64, 64, 4, 2),
}
"""The same for the gradients of keys and values."""
HOPPER_FORWARD = Tiles(64, 64, 4, 1)
"""Those of the kernel for Hopper, forward."""
HOPPER_OF_QUERIES = {64: Tiles(64, 64, 4, 2, max_registers=168), 128: Tiles(64, 64, 4, 2)}
"""Those for the gradient of queries: with heads of 64, three programs that fit a multiprocessor are faster than two."""
HOPPER_OF_KEYS: Mapping[Key, Tiles] = {
    (64, False): Tiles(64, 64, 4, 3),
    (64, True): Tiles(64, 64, 4, 2),
    (128, False): Tiles(64, 128, 8, 3),
    (128, True): Tiles(64, 128, 8, 3),
}
"""Those for the gradients of keys and values: with heads of 128 a program with 128 keys is faster than two with 64."""
SMALLER = (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1))
"""Tiles where those do not fit; all but the first also for float32 and for heads above 128."""

PROGRAMS = {4: 8, 8: 2}
"""Programs of the gradients of keys for each multiprocessor, or more, by their warps: they take unequal times."""


@cache
def forward_tiles(device: Device, dtype: torch.dtype, dk: int, dv: int, *, windowed: bool) -> Tiles:
    """Return the first tiles of the forward pass that fit.

    Raises:
        ValueError: none fit.
    """
    return _first_that_fits(_candidates(FORWARD[windowed], dtype, dk, dv), device, dtype, dk, dv)


@cache
def backward_tiles(
    device: Device, dtype: torch.dtype, dk: int, dv: int, *, windowed: bool, placed: bool
) -> tuple[Tiles, Tiles]:
    """Return the first tiles that fit, for the gradient of queries and for the gradients of keys.

    Triton 3.7 cannot pipeline the positions of ``placed`` queries, which the second kernel reads in its loop.

    Raises:
        ValueError: none fit.
    """
    dim = _upper_bound(dk, dv)
    of_queries, of_keys = (_candidates(x, dtype, dk, dv) for x in (OF_QUERIES[dim], OF_KEYS[dim, windowed]))
    if placed:
        of_keys = [replace(tiles, num_stages=1) for tiles in of_keys]
    return (
        _first_that_fits(of_queries, device, dtype, dk, dv, backward=True),
        _first_that_fits(of_keys, device, dtype, dk, dv, backward=True, keys_stay=True),
    )


def hopper_tiles(dk: int, dv: int, *, windowed: bool) -> tuple[Tiles, Tiles]:
    """Return those of the kernels for Hopper, for the gradient of queries and for the gradients of keys."""
    dim = _upper_bound(dk, dv)
    return HOPPER_OF_QUERIES[dim], HOPPER_OF_KEYS[dim, windowed]


def heads_of_program(group: int, most_programs: int, num_warps: int, multiprocessors: int) -> int:
    """Return over how many heads of a group a program sums the gradients of keys, the most that leave enough programs.

    Args:
        group: query heads of a key head.
        most_programs: programs that sum one head each.
        num_warps: of a program.
        multiprocessors: of the device.
    """
    enough = PROGRAMS[num_warps] * multiprocessors
    return max((n for n in range(1, group + 1) if group % n == 0 and most_programs // n >= enough), default=1)


def _upper_bound(dk: int, dv: int) -> int:
    return 64 if max(dk, dv) <= 64 else 128


def _candidates(preferred: Tiles, dtype: torch.dtype, dk: int, dv: int) -> Sequence[Tiles]:
    return SMALLER[1:] if dtype == torch.float32 or max(dk, dv) > 128 else (preferred, *SMALLER)


def _first_that_fits(
    candidates: Sequence[Tiles],
    device: Device,
    dtype: torch.dtype,
    dk: int,
    dv: int,
    *,
    backward: bool = False,
    keys_stay: bool = False,
) -> Tiles:
    """Return the first tiles whose staying rows, streaming rows and probabilities fit shared memory together."""

    def bytes_of(tiles: Tiles) -> int:
        stay, stream = (tiles.keys, tiles.queries) if keys_stay else (tiles.queries, tiles.keys)
        both = padded(dk) + padded(dv)
        numbers = stay * (both if backward else padded(dk)) + device.buffers(tiles.num_stages, dtype) * stream * both
        return (numbers + stay * stream) * dtype.itemsize

    error = f"k: impl='triton' expects a tile of keys of {dk} and values of {dv} numbers of {dtype} to fit"
    return first_that_fits(candidates, bytes_of, device, error)
