"""Selected blocks of a cache, whose rows are sequences from token 0: the blocks are tiles of the keys as they lie."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import by_query, stored


def cached_selected_mask(
    block_indices: Tensor, token: Tensor, num_keys: int, *, rows: int, config: NSAConfig
) -> BlockMask:
    """Turn selected blocks into the mask of queries whose heads are folded into ``rows`` rows each.

    Without backward nobody asks for a block's queries, so the blocks themselves are all that there is to say.

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

    return BlockMask(
        seq_lengths=(block_indices.shape[2] * rows, num_keys),
        kv_num_blocks=(block_indices >= 0).sum(-1, dtype=torch.int32),
        kv_indices=block_indices.clamp_min(0),
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(rows, config.select_block_size),
        mask_mod=mask_mod,
    )
