"""Parts and offsets of the selected branch, and upper bounds of its lists, which :mod:`selected_lists` defines."""

from __future__ import annotations

from torch import Tensor

SLOTS = 4
"""Rows of partial results that a thread of a Gluon kernel loads at a time."""
SUM_ROWS = 16
"""(Query, head) rows of a program that adds up the partial results of a query's blocks."""
Part = tuple[slice, slice]
"""Some batch elements, or some heads of one."""


def is_whole(part: Part, x: Tensor) -> bool:
    """Return whether a part of ``x (B, H, ...)`` is all of it."""
    return part == (slice(0, x.shape[0]), slice(0, x.shape[1]))


def num_key_tiles(num_keys: int, block_size: int, *, has_positions: bool) -> int:
    """Return the number of key tiles that ``num_keys`` keys may need; documents may start before the first key."""
    runs = (num_keys + block_size - 1) // block_size
    return 2 * (runs + 1) if has_positions else runs


def max_replicas(key_tiles: int, num_pairs: int, capacity: int) -> int:
    """Return an upper bound of the replicas of a chunk: one partial per key tile, and the full ones that pairs fill."""
    return key_tiles + num_pairs // capacity


def max_shared(num_pairs: int, capacity: int) -> int:
    """Return an upper bound of the replicas of tiles with several: all but one of a tile are full, so at least half."""
    return max(1, 2 * (num_pairs // capacity))
