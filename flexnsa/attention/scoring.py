"""How much each block matters to each query: softmax over compressed keys, summed by overlap (Eq. 8 to 10)."""

from __future__ import annotations

import functools
from math import e, log2

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.config import NSAConfig, overlap_band
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import compressed_positions, modify_groups

LOG2_E = log2(e)
"""Probabilities are powers of two wherever that is possible: a CPU computes them three times as fast as those of e."""


def group_probabilities(q: Tensor, k_cmp: Tensor, lse: Tensor | None, positions: Positions, call: Call) -> Tensor:
    """Sum ``p_cmp`` over the query heads of each group, fp32 ``(B, Hkv, T, N)`` (Eq. 8 and 10).

    ``positions`` are those of the queries ``q (B, Hq, T, Dk)``, which may be some of the call's only. ``lse`` of the
    compressed branch saves the normalisation where it is at hand.
    """
    key = torch.arange(k_cmp.shape[2], dtype=torch.int32, device=q.device)
    hidden = compressed_intervals(positions, call.config).hide(key)

    natural = lse is None or call.score_mod is not None
    unit = 1.0 if natural else LOG2_E
    group = q.shape[1] // k_cmp.shape[1]
    # The heads of a group share their keys.
    q_BKRD = torch.unflatten(q.float() * (call.scale * unit), 1, (-1, group)).flatten(2, 3)
    scores = torch.unflatten(q_BKRD @ k_cmp.float().mT, 2, (group, -1))
    if call.score_mod is not None:
        kv_idx = compressed_positions(key.view(1, 1, 1, -1), positions, call.config)
        scores = modify_groups(call.score_mod, scores, positions, kv_idx)
    if lse is None:
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill_(empty, 0).sum(2)
    lse = torch.unflatten(lse, 1, (k_cmp.shape[1], -1))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has probabilities 0, not NaN
    # Hidden keys may give anything, infinity included; they are cheaper to hide in the sum than in each head.
    shift = lse[..., None] * unit
    # What a mod returns may be a tensor that it captured, or one number seen as many: it is read only.
    scores = scores.sub_(shift) if call.score_mod is None else (scores - shift).to(scores.dtype)
    probs = scores.exp_() if natural else scores.exp2_()
    return probs.sum(2).masked_fill_(hidden[:, None], 0)


def block_scores(probs: Tensor, positions: Positions | None, *, num_blocks: int, config: NSAConfig) -> Tensor:
    """Sum the compressed tokens that overlap each block of the query's document, ``(B, Hkv, T, M)`` (Eq. 9).

    Without ``positions``, all sequences start at token 0, and each block's compressed tokens are at fixed columns.
    """
    first, weights = overlap_band(config)
    step = config.strides_per_block
    width = (num_blocks - 1) * step + len(weights)
    num_keys = probs.shape[-1]

    if positions is None:
        banded = F.pad(probs, (-first, width + first - num_keys))
    else:
        index = columns_of_blocks(num_keys, positions, num_blocks, config).to(torch.int64)[:, None]
        banded = F.pad(probs, (0, 1)).gather(-1, index.expand(*probs.shape[:3], width))
    blocks = (banded[..., o : o + (num_blocks - 1) * step + 1 : step] * weight for o, weight in enumerate(weights))
    return functools.reduce(Tensor.add_, blocks)


def columns_of_blocks(num_keys: int, positions: Positions, blocks: int, config: NSAConfig) -> Tensor:
    """Return the compressed keys that overlap blocks, in their order, ``(B, T, C)``; ``num_keys`` for what is none."""
    first, weights = overlap_band(config)
    stop = first + (blocks - 1) * config.strides_per_block + len(weights)
    key = torch.arange(first, stop, device=positions.token.device)
    columns = key + positions.cmp_start[..., None]
    return columns.where((key >= 0) & (columns < num_keys), num_keys)


def aligned(width: int) -> int:
    """Round a number of blocks up to the alignment of the score rows."""
    return -(-width // 16) * 16
