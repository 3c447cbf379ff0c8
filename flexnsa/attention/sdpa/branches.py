"""Plain PyTorch, eager and differentiable, in linear memory: the implementation that trains on CPUs.

Dense branches go through their intervals in chunks of queries, the selected branch block by block. On an accelerator
each call reads a few loop bounds on the host; ``flex`` reads none.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flexnsa.attention.scoring import group_probabilities
from flexnsa.attention.sdpa import score_mod as modded
from flexnsa.attention.sdpa.gathered import gathered_attention
from flexnsa.attention.sdpa.interval import interval_attention
from flexnsa.attention.sdpa.key_major import selected_attention as key_major_attention
from flexnsa.attention.selection import select_in_chunks, select_openly
from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.user_mods import ScoreMod, compressed_positions, token_positions
from flexnsa.masks.window import window_intervals
from flexnsa.positions import Positions, positions_of

COMPRESSED_CHUNK, WINDOW_CHUNK = 256, 64
"""Queries a chunk: enough for the products to run at full speed, few enough for their scores to stay in cache."""
GATHERED_QUERIES = 16
"""Up to so many queries, gathering their keys is faster than going block by block."""


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed tokens that lie wholly in the past (section 3.3.1)."""
    positions = positions_of(q, positions)
    visible = compressed_intervals(positions, config)
    if score_mod is not None:
        places = functools.partial(compressed_positions, config=config)
        return modded.interval_attention(q, k_cmp, v_cmp, visible, positions, places, score_mod, scale)
    return interval_attention(q, k_cmp, v_cmp, visible.lo, visible.hi, scale, COMPRESSED_CHUNK)


def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the last ``window_size`` tokens of the document (section 3.3.3)."""
    positions = positions_of(q, positions)
    visible = window_intervals(positions, config)
    if score_mod is not None:
        return modded.interval_attention(q, k, v, visible, positions, token_positions, score_mod, scale)
    return interval_attention(q, k, v, visible.lo, visible.hi, scale, WINDOW_CHUNK)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the past tokens of the selected blocks (section 3.3.2)."""
    positions = positions_of(q, positions)
    if score_mod is not None:
        return modded.selected_attention(q, k, v, block_indices, positions, score_mod, scale, config.select_block_size)
    # A compiler would make a graph of either: one for few queries, and one for all the others.
    few = not torch.compiler.is_compiling() and q.shape[2] <= GATHERED_QUERIES
    attention = gathered_attention if few else key_major_attention
    return attention(q, k, v, block_indices, positions.token, positions.start, scale, config.select_block_size)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    positions: Positions | None,
    *,
    config: NSAConfig,
    scale: float,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Choose the ``n`` best blocks of each query, a chunk of queries at a time (Eq. 8 to 10)."""
    positions = positions_of(q, positions)
    if score_mod is None:
        return select_in_chunks(q, k_cmp, lse, positions, config=config, scale=scale)
    probabilities = functools.partial(group_probabilities, config=config, scale=scale, score_mod=score_mod)
    return select_openly(q, k_cmp, lse, positions, config=config, probabilities=probabilities)
