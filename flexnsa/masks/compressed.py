"""The mask of the compressed branch: compressed tokens whose last token is not in the future (paper, section 3.3.1)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.config import NSAConfig
from flexnsa.masks.intervals import Intervals, interval_block_mask
from flexnsa.masks.positions import Positions


def compressed_intervals(positions: Positions, config: NSAConfig) -> Intervals:
    """Return the compressed tokens ``i`` with ``i * d + l - 1 <= t``, both counted in the query's document."""
    complete = positions.token - positions.start - config.compress_block_size + 1
    visible = (complete.div(config.compress_stride, rounding_mode="floor") + 1).clamp_min(0)
    return Intervals(positions.cmp_start, positions.cmp_start + visible)


def compressed_mask(
    positions: Positions | None, seq_len: int, num_keys: int, config: NSAConfig, device: torch.device
) -> BlockMask:
    """Build the mask of ``seq_len`` queries at ``positions``, None for one whole sequence, over ``num_keys`` keys.

    Its lists hold only their first tile, see :func:`flexnsa.masks.intervals.interval_block_mask`.
    """
    length, stride = operator.index(config.compress_block_size), operator.index(config.compress_stride)

    def complete(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return kv_idx * stride + length - 1 <= q_idx

    queries = positions or Positions.of_sequence(seq_len, device)
    mask_mod = complete if positions is None else None
    return interval_block_mask(compressed_intervals(queries, config), num_keys, widths=None, mask_mod=mask_mod)
