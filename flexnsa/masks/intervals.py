"""Block masks of intervals: in a dense branch a query sees the keys ``[lo, hi)``, and both bounds never decrease.

So the key tiles that a query tile touches are a range, and those it sees in full are a range inside it. The same holds
for the query tiles of a key tile. The BlockMask therefore follows in closed form from the bounds at the edges of the
tiles; no (query, key) pair is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

DENSE_TILE = 128
"""Queries, and keys, per tile in the dense branches: the size that FlexAttention's kernels are tuned for."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(b, h, q_idx, kv_idx)`` to bool, of token positions (a user's mod) or of a kernel's own indices."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Visible keys ``[lo, hi)`` of each query, int32 ``(B or 1, T)``; an empty interval has ``hi <= lo``."""

    lo: Tensor
    hi: Tensor

    def hide(self, key: Tensor) -> Tensor:
        """Return which of the keys ``(K,)`` each query does not see, ``(B or 1, T, K)``."""
        return (key < self.lo[..., None]) | (key >= self.hi[..., None])


@dataclass(frozen=True, slots=True)
class TileRanges:
    """Tiles ``[first, end)`` that each tile row touches, ``[first_full, end_full)`` in full; all int32 ``(B, R)``."""

    first: Tensor
    end: Tensor
    first_full: Tensor
    end_full: Tensor


def interval_block_mask(
    intervals: Intervals,
    num_keys: int,
    *,
    widths: tuple[int, int] | None,
    block_size: tuple[int, int] = (DENSE_TILE, DENSE_TILE),
    mask_mod: MaskMod | None = None,
) -> BlockMask:
    """Build the BlockMask of ``intervals`` with memory linear in queries and keys.

    Args:
        intervals: of ``T`` queries.
        num_keys: length of the key sequence.
        widths: upper bounds of the key tiles that a query tile touches, and of the query tiles that a key tile touches
            (see :func:`tiles_touched`). With None, each list holds only its first tile: its tiles are consecutive then,
            and a kernel with ``BLOCKS_ARE_CONTIGUOUS`` needs no more.
        block_size: queries and keys per tile.
        mask_mod: the same intervals as a formula, which costs a kernel less than reading the bounds.
    """
    num_queries = intervals.hi.shape[-1]
    intervals = Intervals(stored(intervals.lo), stored(intervals.hi))
    rows = _tiles_of_queries(intervals, num_keys, block_size)
    columns = _tiles_of_keys(intervals, num_keys, block_size)
    if widths is None:
        kv_lists, q_lists = _consecutive_lists(rows), _consecutive_lists(columns)
    else:
        kv_lists, q_lists = _compact_lists(rows, widths[0]), _compact_lists(columns, widths[1])
    return BlockMask((num_queries, num_keys), *kv_lists, *q_lists, block_size, mask_mod or interval_mask_mod(intervals))


def interval_mask_mod(intervals: Intervals) -> MaskMod:
    """Return a mask_mod that is True where the key is in the query's interval."""
    lo, hi = by_query(intervals.lo), by_query(intervals.hi)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (lo(b, q_idx) <= kv_idx) & (kv_idx < hi(b, q_idx))

    return mask_mod


def by_query(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that reads ``table (B or 1, T)`` by batch index and query inside a mask_mod."""
    if table.shape[0] > 1:
        return lambda b, query: table[b, query]
    row = table[0]
    return lambda b, query: row[query]  # noqa: ARG005


def tiles_touched(length: int, tile: int) -> int:
    """Return the number of tiles that ``length`` consecutive positions touch at most, wherever they start."""
    return (length + tile - 2) // tile + 1


def stored(table: Tensor) -> Tensor:
    """Make Inductor compute ``table`` once and store it.

    Otherwise it would evaluate the formula again wherever the table is read, in a mask_mod too, and it fails to
    simplify quotients of maxima of an arange. It always stores the input of ``as_strided``.
    """
    return table.as_strided(table.shape, table.stride())


def _tiles_of_queries(intervals: Intervals, num_keys: int, block_size: tuple[int, int]) -> TileRanges:
    q_tile, kv_tile = block_size
    num_queries = intervals.hi.shape[-1]
    top = torch.arange(0, num_queries, q_tile, device=intervals.hi.device)
    bottom = (top + q_tile - 1).clamp_max(num_queries - 1)
    # The bounds never decrease, so the first and last query of a tile have its smallest and largest.
    return _ranges(
        first=intervals.lo[:, top],
        end=intervals.hi[:, bottom].clamp_max(num_keys),
        first_full=intervals.lo[:, bottom],
        end_full=intervals.hi[:, top],
        tile=kv_tile,
    )


def _tiles_of_keys(intervals: Intervals, num_keys: int, block_size: tuple[int, int]) -> TileRanges:
    q_tile, kv_tile = block_size
    batch, num_queries = intervals.hi.shape
    left = torch.arange(0, num_keys, kv_tile, dtype=torch.int32, device=intervals.hi.device)
    left = left.expand(batch, -1).contiguous()
    right = left + kv_tile - 1
    lo, hi = intervals.lo.expand_as(intervals.hi).contiguous(), intervals.hi.contiguous()
    end_full = torch.searchsorted(lo, left, right=True, out_int32=True)  # queries before it have lo <= left
    return _ranges(
        first=torch.searchsorted(hi, left, right=True, out_int32=True),  # from here on hi > left
        end=torch.searchsorted(lo, right, right=True, out_int32=True),
        first_full=torch.searchsorted(hi, right, right=True, out_int32=True),
        # Rows after the last query need no mask, so the last query tile counts as complete.
        end_full=torch.where(end_full == num_queries, end_full + q_tile - 1, end_full),
        tile=q_tile,
    )


def _ranges(first: Tensor, end: Tensor, first_full: Tensor, end_full: Tensor, tile: int) -> TileRanges:
    """Convert bounds to tiles, rounded outwards for touched tiles and inwards for full ones."""
    first = first // tile
    end = torch.maximum((end + tile - 1) // tile, first)
    first_full = torch.minimum((first_full + tile - 1) // tile, end)
    end_full = torch.minimum(torch.maximum(end_full // tile, first_full), end)
    empty = first_full >= end_full
    return TileRanges(first, end, torch.where(empty, first, first_full), torch.where(empty, first, end_full))


def _compact_lists(ranges: TileRanges, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts and lists ``(B, 1, R, width)`` of partial tiles, and of full ones, the middle of each range."""
    first, end, first_full, end_full = (
        x[:, None, :, None] for x in (ranges.first, ranges.end, ranges.first_full, ranges.end_full)
    )
    step = torch.arange(width, dtype=torch.int32, device=first.device)
    before, last = first_full - first, (end - 1).clamp_min(0)
    partial = first + step + torch.where(step < before, 0, end_full - first_full)
    num_full = end_full - first_full
    return (
        (end - first - num_full)[..., 0],
        torch.minimum(partial, last),
        num_full[..., 0],
        torch.minimum(first_full + step, last),
    )


def _consecutive_lists(ranges: TileRanges) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts, and lists ``(B, 1, R, 1)`` of the first partial tile and of the first full one.

    Partial tiles on both sides of full ones would not be consecutive; the whole range is marked partial then.
    """
    first, end = ranges.first, ranges.end
    both_sides = (ranges.first_full > first) & (ranges.end_full < end)
    first_full = torch.where(both_sides, first, ranges.first_full)
    end_full = torch.where(both_sides, first, ranges.end_full)
    num_full = end_full - first_full
    first_partial = torch.where(first_full > first, first, end_full)
    # An empty list still holds a valid tile, because a kernel may read the tile before the count.
    last = (end - 1).clamp_min(0)
    lists = (end - first - num_full, torch.minimum(first_partial, last), num_full, torch.minimum(first_full, last))
    counts_or_tiles = [x[:, None, :] for x in lists]
    return counts_or_tiles[0], counts_or_tiles[1][..., None], counts_or_tiles[2], counts_or_tiles[3][..., None]
