"""How far the scores of blocks are from their true shares, at a few queries of each sequence, in linear memory."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from flexnsa.attention.seam import Call, Scorer
from flexnsa.attention.selection import top_blocks
from flexnsa.attention.shares import at_columns, grouped_products, log_shares, log_shares_at_once, queries_at_once
from flexnsa.config import NSAConfig
from flexnsa.geometry import overlap_band
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.user_mods import apply_score_mod, compressed_positions, query_positions
from flexnsa.positions import Positions, positions_of

BITS = 0xFFFFFFFF


def sampled_tokens(
    seq_len: int, num_queries: int, seed: int | Tensor, step: int | Tensor, sequence_ids: Tensor
) -> Tensor:
    """Choose one token from each of ``num_queries`` equal stretches of every sequence, int64 ``(B, m)``.

    A shorter sequence gives all of its tokens. The choice is a function of the arguments alone, in integers, so that
    it is the same on every device, whatever was drawn before.

    Args:
        seq_len: ``S``.
        num_queries: ``m``, at most.
        seed: of a run.
        step: of the run.
        sequence_ids: int ``(B,)``, the index of each sequence in the global batch.
    """
    count = min(num_queries, seq_len)
    edges = torch.arange(count + 1, device=sequence_ids.device) * seq_len // count
    sequence_ids = sequence_ids.to(torch.int64)
    of_run = _mixed(_mixed(torch.zeros_like(sequence_ids) + seed) ^ step)
    drawn = _mixed(_mixed(of_run ^ sequence_ids)[:, None] ^ edges[:-1])
    return edges[:-1] + drawn % edges.diff()


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64: the halves are joined to 32 bits, which Wellons' lowbias32 permutes."""
    x = (x ^ (x >> 32)) & BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & BITS
    return x ^ (x >> 16)


def free_blocks(positions: Positions, blocks: int, config: NSAConfig) -> Tensor:
    """Return which blocks each query may leave out, bool ``(B or 1, 1, T, M)``: candidates that are not forced."""
    block = torch.arange(blocks, device=positions.token.device)
    current = ((positions.token - positions.start) // config.select_block_size)[:, None, :, None]
    return (block >= config.num_init_blocks) & (block <= current - config.num_local_blocks)


def divergence(q: Tensor, k: Tensor, scorer: Scorer, tokens: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute the divergence of scores from true shares; see ``flexnsa.attention.seam.Divergence``.

    Both are distributions over the free blocks that have a visible key of the scorer. ``mass`` is the true share of all
    of these; where it is 0, the divergence is 0.
    """
    positions = positions_of(q, call.positions).at_tokens(tokens)
    with torch.autocast(q.device.type, enabled=False):
        with torch.no_grad():
            log_true = log_shares(_at_tokens(q, tokens), k, positions, call)
        log_score, scored = _log_scores(_at_tokens(scorer.q, tokens), scorer, tokens, log_true.shape[-1])
        kept = scored & free_blocks(positions, log_true.shape[-1], call.config)
        return _divergence_over(kept, log_true, log_score)


def _divergence_over(kept: Tensor, log_true: Tensor, log_score: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``KL(true || score)`` over the blocks that are ``kept``, and their true mass, each ``(B, Hkv, m)``."""
    log_true = log_true.masked_fill(~kept, -torch.inf)
    log_mass = log_true.logsumexp(-1)
    some = log_mass > -torch.inf
    log_true = log_true - log_mass.masked_fill(~some, 0)[..., None]
    log_score = log_score.masked_fill(~kept, -torch.inf).masked_fill(~some[..., None], 0).log_softmax(-1)
    true = log_true.exp()
    terms = torch.where(true > 0, true * (log_true - log_score), 0)
    return terms.sum(-1), log_mass.exp()


def _at_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Take the queries at ``tokens (B, m)`` of ``x (B, H, T, D)``."""
    return x.gather(2, tokens[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _log_scores(q: Tensor, scorer: Scorer, tokens: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return the log of the scores of blocks (Eq. 8 to 10) and which blocks have a visible key, ``(B, Hkv, m, M)``.

    The scores of other blocks are finite and undefined.
    """
    call, num_keys = scorer.call, scorer.k.shape[2]
    positions = positions_of(scorer.q, call.positions).at_tokens(tokens)
    scores = grouped_products(q, scorer.k, call.scale)  # (B, Hkv, H, m, N)
    key = torch.arange(num_keys, dtype=torch.int32, device=q.device)
    visible = compressed_intervals(positions, call.config)
    hidden = ((key < visible.lo[..., None]) | (key >= visible.hi[..., None]))[:, None, None]
    if call.score_mod is not None:
        kv_idx = compressed_positions(key.view(1, 1, 1, -1), positions, call.config)
        modified = apply_score_mod(call.score_mod, scores.flatten(1, 2), query_positions(positions), kv_idx)
        scores = torch.unflatten(modified, 1, scores.shape[1:3])
        hidden = hidden | (scores == -torch.inf)
    hidden = hidden.expand_as(scores)
    # A row without a key gets any finite normaliser: the gradient of a log-sum-exp of nothing is NaN.
    empty = hidden.all(-1, keepdim=True)
    lse = scores.masked_fill(hidden, -torch.inf).masked_fill(empty, 0).logsumexp(-1, keepdim=True)
    probs = (scores - lse).masked_fill(hidden, -torch.inf)

    first, weights = overlap_band(call.config)
    step = call.config.select_block_size // call.config.compress_stride
    own = torch.arange(first, first + (blocks - 1) * step + len(weights), device=q.device)
    columns = own + positions.cmp_start[..., None]
    columns = columns.where((own >= 0) & (columns < num_keys), num_keys)
    probs = at_columns(probs, columns)
    terms = [probs[..., o : o + (blocks - 1) * step + 1 : step] + log(weight) for o, weight in enumerate(weights)]
    of_block = torch.stack(terms, -1).movedim(2, -1).flatten(-2)  # (B, Hkv, m, M, keys of a block)
    scored = (of_block > -torch.inf).any(-1)
    return of_block.masked_fill(~scored[..., None], 0).logsumexp(-1), scored


@torch.no_grad()
def found_and_best(q: Tensor, k: Tensor, block_indices: Tensor, call: Call, *, forced: bool) -> tuple[Tensor, Tensor]:
    """Sum the true shares of the chosen blocks, and of the best ones, over sequences and queries, fp64 ``(Hkv,)``.

    Without ``forced``, the blocks that every choice has are left out.
    """
    positions, chunk = positions_of(q, call.positions), queries_at_once(q, k)
    found, best = (torch.zeros(k.shape[1], dtype=torch.float64, device=q.device) for _ in range(2))
    with torch.autocast(q.device.type, enabled=False):
        for at in range(0, q.shape[2], chunk):
            part = slice(at, at + chunk)
            here = positions.at(part)
            shares = log_shares_at_once(q[:, :, part], k, here, call).exp().float()
            counted = shares if forced else shares * free_blocks(here, shares.shape[-1], call.config)
            found += _sum_chosen(block_indices[:, :, part], counted)
            best += _sum_chosen(top_blocks(shares, here, config=call.config), counted)
    return found, best


def _sum_chosen(block_indices: Tensor, shares: Tensor) -> Tensor:
    real = (block_indices >= 0) & (block_indices < shares.shape[-1])
    chosen = shares.gather(-1, block_indices.clamp(0, shares.shape[-1] - 1).to(torch.int64))
    return chosen.masked_fill(~real, 0).sum((0, 2, 3), dtype=torch.float64)
