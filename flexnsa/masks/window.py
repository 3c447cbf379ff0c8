"""The mask of the sliding window: the last ``w`` keys of the document, the query's included (paper, section 3.3.3)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import DENSE_TILE, Intervals, interval_block_mask, tiles_touched
from flexnsa.masks.positions import Positions


def window_intervals(positions: Positions, config: NSAConfig) -> Intervals:
    """Return the keys ``t - w + 1 .. t``, from the document's first token and from key 0 on."""
    lo = torch.maximum(positions.start, positions.token - (config.window_size - 1)).clamp_min(0)
    return Intervals(lo, positions.token + 1)


def window_mask(
    positions: Positions | None, seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    """Build the mask of ``seq_len`` queries at ``positions``, None for one whole sequence, over ``num_keys`` keys.

    Where the queries are not consecutive, a query tile may touch every key tile. The lists then hold only their first
    tile, see :func:`flexnsa.masks.intervals.interval_block_mask`.
    """
    window = operator.index(config.window_size)

    def recent(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return (kv_idx <= q_idx) & (q_idx < kv_idx + window)

    queries = positions or Positions.of_sequence(seq_len, device)
    mask_mod = recent if positions is None else None
    widest = tiles_touched(DENSE_TILE + window - 1, DENSE_TILE)
    widths = (widest, widest) if queries.consecutive else None
    return interval_block_mask(window_intervals(queries, config), num_keys, widths=widths, mask_mod=mask_mod)
