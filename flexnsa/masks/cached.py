"""Masks of a few queries over a cache, whose sequences start at token 0. One tile row is one query.

There is no backward, so the lists of queries of each key tile, which only backward reads, are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig, num_blocks
from flexnsa.masks.intervals import Intervals, by_query, stored


def cached_selected_mask(
    block_indices: Tensor, token: Tensor, num_keys: int, *, rows: int, config: NSAConfig
) -> BlockMask:
    """Build the mask of selected blocks for queries whose heads are folded into ``rows`` kernel rows each.

    A block is a key tile of the cache itself; nothing is gathered.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1.
        token: int32 ``(B or 1, T)``, the index of each query's own key.
        num_keys: length of the cache.
        rows: kernel rows per query, at least the size of a head group.
        config: provides the block size.
    """
    token_of = by_query(stored(token))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return kv_idx <= token_of(b, q_idx // rows)

    return BlockMask.from_kv_blocks(
        (block_indices >= 0).sum(-1, dtype=torch.int32),
        block_indices.clamp(0, num_blocks(num_keys, config) - 1),  # never out of bounds, whatever was selected
        BLOCK_SIZE=(rows, config.select_block_size),
        mask_mod=mask_mod,
        seq_lengths=(block_indices.shape[2] * rows, num_keys),
        compute_q_blocks=False,
    )


def cached_interval_mask(intervals: Intervals, num_keys: int, *, rows: int, tile: int) -> BlockMask:
    """Build the mask of queries that each see an interval of keys, heads folded as in :func:`cached_selected_mask`.

    Args:
        intervals: of ``T`` queries, in any order.
        num_keys: length of the keys.
        rows: kernel rows per query.
        tile: keys per tile. No tile is marked full: a query has few, and they are split among programs.
    """
    lo, hi = stored(intervals.lo.expand_as(intervals.hi)), stored(intervals.hi)
    lo_of, hi_of = by_query(lo), by_query(hi)
    num_tiles = -(-num_keys // tile)
    first = lo // tile
    lists = first[..., None] + torch.arange(num_tiles, dtype=torch.int32, device=hi.device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        query = q_idx // rows
        return (lo_of(b, query) <= kv_idx) & (kv_idx < hi_of(b, query))

    return BlockMask.from_kv_blocks(
        ((hi + tile - 1) // tile - first).clamp_min(0)[:, None],
        lists.clamp_max(num_tiles - 1)[:, None],
        BLOCK_SIZE=(rows, tile),
        mask_mod=mask_mod,
        seq_lengths=(hi.shape[1] * rows, num_keys),
        compute_q_blocks=False,
    )
