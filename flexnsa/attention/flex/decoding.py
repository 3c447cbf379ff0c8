"""``flex`` where the keys are a cache: few queries, each row one sequence from token 0, no backward.

The heads of a group are folded into rows in all branches, because they share their keys and a tile has room. Selected
blocks are read where they lie: nothing is gathered, and no list of the queries of a block is needed. The fewest
queries, on CUDA, have a kernel of their own: :mod:`flexnsa.attention.flex.split_kv`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.attention.flex import branches as flex
from flexnsa.attention.flex import split_kv as flex_decoding
from flexnsa.attention.flex.branches import select_blocks
from flexnsa.attention.flex.kernels import (
    TILE,
    Result,
    attend,
    check_inputs,
    compile_once,
    selected_options,
    unfold_heads,
)
from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.decoding import cached_selected_mask
from flexnsa.masks.intervals import interval_block_mask
from flexnsa.masks.user_mods import ScoreMod, mod_of_tokens
from flexnsa.positions import Positions

__all__ = ["compressed_attention", "select_blocks", "selected_attention", "sliding_window_attention"]


def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, positions: Positions, **options: Any) -> Result:
    """As :func:`flexnsa.attention.flex.branches.compressed_attention`."""
    check_inputs(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    if flex_decoding.is_decoding(q, k_cmp):
        return flex_decoding.compressed_attention(q, k_cmp, v_cmp, positions, **options)
    return _folded(_compressed, q, k_cmp, v_cmp, positions, options)


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, positions: Positions, **options: Any) -> Result:
    """As :func:`flexnsa.attention.flex.branches.sliding_window_attention`."""
    check_inputs(q=q, k=k, v=v)
    if flex_decoding.is_decoding(q, k):
        return flex_decoding.sliding_window_attention(q, k, v, positions, **options)
    return _folded(flex.sliding_window_attention, q, k, v, positions, options)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Result:
    """As :func:`flexnsa.attention.flex.branches.selected_attention`, for positions that all start at 0."""
    check_inputs(q=q, k=k, v=v)
    if q.is_cuda and config.select_block_size % 16:
        raise ValueError(f"select_block_size: expected a multiple of 16 on CUDA, got {config.select_block_size}")
    options = {"config": config, "scale": scale, "score_mod": score_mod}
    if flex_decoding.is_decoding(q, k):
        return flex_decoding.selected_attention(q, k, v, block_indices, positions, **options)
    return compile_once(_selected)(q, k, v, block_indices, positions, config, scale, score_mod)


def _compressed(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    positions: Positions,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Result:
    if q.shape[1] != k_cmp.shape[1] or score_mod is not None:
        return flex.compressed_attention(q, k_cmp, v_cmp, positions, config=config, scale=scale, score_mod=score_mod)
    mask = interval_block_mask(compressed_intervals(positions, config), k_cmp.shape[2], widths=None)
    return compile_once(_contiguous)(q, k_cmp, v_cmp, mask, scale)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Result:
    # As they lie: to repeat or pad the keys, which pays in training, would copy all of them for a token.
    return attend(q, k, v, mask, scale, {"BLOCKS_ARE_CONTIGUOUS": True})


def _selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None,
) -> Result:
    groups = q.shape[1] // k.shape[1]
    rows = -(-groups // 16) * 16 if q.is_cuda else groups  # tensor cores want 16 rows, a CPU any number
    mask = cached_selected_mask(block_indices, positions.token, k.shape[2], rows=rows, config=config)
    options = selected_options(*mask.BLOCK_SIZE, q.dtype)
    kernel_mod = score_mod and mod_of_tokens(score_mod, positions, rows=rows, groups=groups)
    out, lse = attend(_fold(q, rows, groups), k, v, mask, scale, options, kernel_mod)
    return unfold_heads(out, rows, groups), None if lse is None else unfold_heads(lse, rows, groups)


def _folded(attention: Any, q: Tensor, k: Tensor, v: Tensor, positions: Positions, options: dict[str, Any]) -> Result:
    """Attend with the heads of a group as queries at the same place, as long as they fit a tile.

    To a score_mod such rows would all be one head; with one, heads stay apart.
    """
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or groups * q.shape[2] > TILE or options.get("score_mod") is not None:
        return attention(q, k, v, positions, **options)
    places = (positions.token, positions.start, positions.cmp_start)
    positions = Positions(*(x.repeat_interleave(groups, dim=1) for x in places))
    out, lse = attention(_fold(q, groups, groups), k, v, positions, **options)
    return unfold_heads(out, groups, groups), None if lse is None else unfold_heads(lse, groups, groups)


def _fold(q: Tensor, rows: int, groups: int) -> Tensor:
    """Lay the heads of a group below each other: ``(B, Hq, T, D)`` to ``(B, Hkv, T * rows, D)``."""
    grouped = q.unflatten(1, (-1, groups)).transpose(2, 3)
    return F.pad(grouped, (0, 0, 0, rows - groups)).flatten(2, 3)
