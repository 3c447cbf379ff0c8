"""Masks of a few queries on a cache, whose rows are sequences from token 0. One row of tiles is one query.

Without backward nobody asks for a tile's queries, so the tiles of each query are all that there is to say.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig
from flexnsa.geometry import num_blocks
from flexnsa.masks.intervals import Intervals, MaskMod, by_query, stored


def cached_selected_mask(
    block_indices: Tensor, token: Tensor, num_keys: int, *, rows: int, config: NSAConfig
) -> BlockMask:
    """Turn selected blocks into the mask of queries whose heads are folded into ``rows`` rows each.

    The blocks are tiles of the keys as they lie.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, ascending, padded right with -1.
        token: int32 ``(B or 1, T)``, the key that each query stands at.
        num_keys: length of the cache.
        rows: rows per query, at least the size of a head group.
        config: gives the block size.
    """
    own = by_query(stored(token))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return kv_idx <= own(b, q_idx // rows)

    return _forward_mask(
        (block_indices >= 0).sum(-1, dtype=torch.int32),
        block_indices.clamp(0, num_blocks(num_keys, config) - 1),  # a tile of the keys, whatever was selected
        num_keys,
        (rows, config.select_block_size),
        mask_mod,
    )


def cached_interval_mask(intervals: Intervals, num_keys: int, *, rows: int, tile: int) -> BlockMask:
    """Build the mask of queries that see an interval of keys each, heads folded as above.

    Args:
        intervals: of ``T`` queries, in any order.
        num_keys: length of the keys.
        rows: rows per query.
        tile: keys of a tile. All are tested one by one: a query's tiles are few, and shared among programs.
    """
    lo, hi = stored(intervals.lo.expand_as(intervals.hi)), stored(intervals.hi)
    lo_of, hi_of = by_query(lo), by_query(hi)
    num_tiles = -(-num_keys // tile)
    first = lo // tile
    lists = first[..., None] + torch.arange(num_tiles, dtype=torch.int32, device=hi.device)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        query = q_idx // rows
        return (lo_of(b, query) <= kv_idx) & (kv_idx < hi_of(b, query))

    return _forward_mask(
        ((hi + tile - 1) // tile - first).clamp_min(0)[:, None],
        lists.clamp_max(num_tiles - 1)[:, None],
        num_keys,
        (rows, tile),
        mask_mod,
    )


def _forward_mask(
    counts: Tensor, tiles: Tensor, num_keys: int, block_size: tuple[int, int], mask_mod: MaskMod
) -> BlockMask:
    """Make the mask whose row of tiles ``t`` is the first ``counts[..., t]`` of ``tiles[..., t, :]``."""
    return BlockMask(
        seq_lengths=(tiles.shape[2] * block_size[0], num_keys),
        kv_num_blocks=counts,
        kv_indices=tiles,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )
