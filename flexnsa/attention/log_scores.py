"""Scores of blocks in log space (Eq. 8 to 10), and their derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.attention.product_scores import differentiate_products, key_products, scores_of_products
from flexnsa.attention.scoring import columns_of_blocks
from flexnsa.attention.shares import at_columns, grouped_products
from flexnsa.config import NSAConfig, overlap_band
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import compressed_positions, modify_groups


def log_probabilities(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Return the log of the scorer's softmax (Eq. 8), ``(B, Hkv, H, m, N)``; with an ``index_score`` its products."""
    if call.config.index_score is not None:
        return key_products(q, k, positions, call)
    scores = grouped_products(q, k, call.scale)
    key = torch.arange(k.shape[2], dtype=torch.int32, device=q.device)
    hidden = compressed_intervals(positions, call.config).hide(key)[:, None, None]
    if call.score_mod is not None:
        kv_idx = compressed_positions(key.view(1, 1, 1, -1), positions, call.config)
        scores = modify_groups(call.score_mod, scores, positions, kv_idx)
        hidden = hidden | (scores == -torch.inf)
    hidden = hidden.expand_as(scores)
    # A row without a key gets any finite normaliser: the gradient of a log-sum-exp of nothing is NaN.
    empty = hidden.all(-1, keepdim=True)
    lse = scores.masked_fill(hidden, -torch.inf).masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    return (scores - lse).masked_fill(hidden, -torch.inf)


def _slices_of_blocks(blocks: int, config: NSAConfig) -> Iterator[tuple[slice, float]]:
    """Yield which columns are the blocks' keys at each offset of their band, and the log of its weight (Eq. 9)."""
    step = config.strides_per_block
    for offset, weight in enumerate(overlap_band(config)[1]):
        yield slice(offset, offset + (blocks - 1) * step + 1, step), log(weight)


def log_scores(log_probs: Tensor, positions: Positions, blocks: int, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Return the log of the scores of blocks (Eq. 9 and 10) and which blocks have a visible key, ``(B, Hkv, m, M)``.

    The scores of other blocks are finite and undefined.
    """
    if config.index_score is not None:
        scores = scores_of_products(log_probs, positions, blocks, config)
        return scores.masked_fill(scores == -torch.inf, 0), scores > -torch.inf
    probs = at_columns(log_probs, columns_of_blocks(log_probs.shape[-1], positions, blocks, config))
    terms = [probs[..., columns] + weight for columns, weight in _slices_of_blocks(blocks, config)]
    of_block = torch.stack(terms, -1).movedim(2, -1).flatten(-2)  # (B, Hkv, m, M, keys of a block)
    scored = (of_block > -torch.inf).any(-1)
    return of_block.masked_fill(~scored[..., None], 0).logsumexp(-1), scored


def differentiate(
    log_probs: Tensor, log_score: Tensor, slope: Tensor, positions: Positions, config: NSAConfig
) -> Tensor:
    """Return the derivatives in the scaled products ``(B, Hkv, H, m, N)``, given those in the log of the scores."""
    if config.index_score is not None:
        return differentiate_products(log_probs, slope, positions, config)
    columns = columns_of_blocks(log_probs.shape[-1], positions, log_score.shape[-1], config)
    probs = at_columns(log_probs, columns)
    in_columns = torch.zeros_like(probs)
    for at_offset, weight in _slices_of_blocks(log_score.shape[-1], config):
        share = (probs[..., at_offset] + weight - log_score[:, :, None]).exp()  # of a key in the score of its block
        in_columns[..., at_offset] += share * slope[:, :, None]
    index = columns.to(torch.int64)[:, None, None].expand_as(in_columns)
    of_keys = F.pad(torch.zeros_like(log_probs), (0, 1)).scatter_add_(-1, index, in_columns)[..., :-1]
    return of_keys - log_probs.exp() * of_keys.sum(-1, keepdim=True)
