"""The true share of each block: softmax over all past keys, summed by block, for a chunk of queries at a time."""

from __future__ import annotations

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.config import num_blocks
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import modify_groups, token_positions

CHUNK_SCORES = {"cpu": 2**21, "cuda": 2**27}
"""Scores of a chunk of queries that exist at a time: in fp32 8 MB, near what a CPU's cache holds, and 512 MB on a GPU.

On two CPU threads 128 MB took twice as long. A GPU computes a larger chunk in the same time.
"""


def queries_at_once(q: Tensor, k: Tensor) -> int:
    """Return how many queries to compute the shares of at a time, at least one."""
    scores = CHUNK_SCORES.get(q.device.type, CHUNK_SCORES["cpu"])
    return max(1, scores // (q.shape[0] * q.shape[1] * k.shape[2]))


def log_shares(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Compute :func:`log_shares_at_once` in chunks of queries."""
    chunk = queries_at_once(q, k)
    slices = [slice(at, at + chunk) for at in range(0, q.shape[2], chunk)]
    return torch.cat([log_shares_at_once(q[:, :, part], k, positions.at(part), call) for part in slices], 2)


def log_shares_at_once(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Return the log of the mean over each group of the softmax mass of every block, ``(B, Hkv, T, M)``.

    Blocks without a visible key have ``-inf``, and so have all blocks of a query that sees no key. The dtype is fp32 or
    wider.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        positions: of the ``T`` queries.
        call: scale, score_mod and the size of blocks.
    """
    # Nothing here holds the scores of tokens, the largest tensor, while they are split by blocks.
    blocks, size = num_blocks(k.shape[2], call.config), call.config.select_block_size
    return mean_shares(
        by_blocks(
            _scores_of_tokens(q, k, positions, call), positions.start, blocks, size, aligned=positions.aligned
        ).logsumexp(-1)
    )


def mean_shares(of_blocks: Tensor) -> Tensor:
    """Return the log of the mean share over each group, given log-sum-exps ``(B, Hkv, G, T, M)`` of blocks."""
    lse = of_blocks.logsumexp(-1, keepdim=True)  # blocks hold all visible keys
    return (of_blocks - lse.masked_fill(lse == -torch.inf, 0)).logsumexp(2) - log(of_blocks.shape[2])


def _scores_of_tokens(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Return the scores of all tokens, ``(B, Hkv, G, T, S)``, ``-inf`` for those to come."""
    scores = grouped_products(q, k, call.scale)
    key = torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
    if call.score_mod is not None:
        scores = modify_groups(call.score_mod, scores, positions, token_positions(key.view(1, 1, 1, -1), positions))
    # Nothing hides keys before a document: its blocks begin at its first token.
    return scores.masked_fill((key > positions.token[..., None])[:, None, None], -torch.inf)


def by_blocks(scores: Tensor, first: Tensor, blocks: int, size: int, *, aligned: bool) -> Tensor:
    """Split scores of keys ``(B, H, G, T, K)`` into those of blocks from the key ``first (B, T)`` on, 0 if ``aligned``.

    They are ``(B, H, G, T, blocks, size)``; ``-inf`` for no key.
    """
    if aligned:
        scores = F.pad(scores, (0, blocks * size - scores.shape[-1]), value=-torch.inf)
    else:
        scores = at_columns(scores, columns_from(first, blocks * size, scores.shape[-1]))
    return torch.unflatten(scores, -1, (blocks, size))


def columns_from(first: Tensor, count: int, num_keys: int) -> Tensor:
    """Return ``count`` columns from ``first (B, T)`` on, ``(B, T, count)``; ``num_keys`` for none."""
    return (first[..., None] + torch.arange(count, device=first.device)).clamp_max(num_keys)


def grouped_products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return ``scale * q.k`` of each key head with the queries of its group, ``(B, Hkv, G, T, S)``, fp32 or wider."""
    dtype, heads = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    q_BKRD = torch.unflatten(q.to(dtype), 1, (heads, -1)).flatten(2, 3)
    return torch.unflatten((q_BKRD * scale) @ k.to(dtype).mT, 2, (q.shape[1] // heads, -1))


def at_columns(logs: Tensor, columns: Tensor) -> Tensor:
    """Take columns ``(B, T, C)`` of ``logs (B, Hkv, G, T, K)``; column ``K`` is ``-inf``."""
    index = columns.to(torch.int64)[:, None, None].expand(*logs.shape[:4], -1)
    return F.pad(logs, (0, 1), value=-torch.inf).gather(-1, index)
