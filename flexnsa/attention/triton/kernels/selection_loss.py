# pyright: standard, reportGeneralTypeIssues=false
"""The selection loss, forward: launches, and the divergence of two distributions over blocks at one query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import cdiv, device_of, multiprocessors, padded
from flexnsa.attention.tiles.scoring import selection_loss_tiles
from flexnsa.attention.triton.arguments import Factors
from flexnsa.attention.triton.kernels.block_log_sums import block_log_sums, log_of
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.selection_loss_bwd import key_gradients, query_gradients
from flexnsa.attention.triton.kernels.visible import count_visible
from flexnsa.config import NSAConfig
from flexnsa.operators.results import with_rows

PROGRAMS = 4
"""Programs of :func:`query_gradients` on each multiprocessor, at least, if there are so many tiles of keys."""
BLOCKS_AT_ONCE = 128
"""Blocks of one query that :func:`compare_blocks` holds at a time."""


@dataclass(frozen=True, slots=True)
class KeyGrid:
    """Where keys begin, in tokens: each has ``length``, one every ``stride``, which divides the blocks' size."""

    length: int
    stride: int
    block_size: int

    @property
    def constants(self) -> dict[str, int]:
        """Where the keys of a block begin, as constants of a kernel."""
        step, first = self.block_size // self.stride, 1 - self.length // self.stride
        return {"LENGTH": self.length, "STRIDE": self.stride, "STEP": step, "FIRST": first}

    @property
    def keys_of_block(self) -> int:
        """Keys that count for a block (Eq. 9)."""
        return (self.block_size + self.length) // self.stride - 1


@dataclass(frozen=True, slots=True)
class Scored:
    """Queries at a few tokens of each sequence, and the keys whose scores count for blocks.

    Args:
        q: ``(B, H, m, D)``.
        k: ``(B, Hkv, N, D)``.
        token: the queries' tokens, int32 ``(B, m)``; this and what follows is contiguous.
        start: the first tokens of their documents, int32 ``(B, m)``.
        first_key: the first keys of their documents, int32 ``(B, m)``.
        grid: of the keys.
        factors: of :func:`flexnsa.attention.triton.arguments.factors_of`.
    """

    q: Tensor
    k: Tensor
    token: Tensor
    start: Tensor
    first_key: Tensor
    grid: KeyGrid
    factors: Factors

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, part: slice, positions: Sequence[Tensor], grid: KeyGrid, factors: Factors
    ) -> Self:
        """Take a part of all queries; ``where`` has the three positions of these, ``(B or 1, m)``."""
        token, start, first_key = (x[:, part].expand(len(q), -1).contiguous() for x in positions)
        return cls(q[:, :, part], k, token, start, first_key, grid, factors)

    @property
    def heads(self) -> int:
        """Queries for each key head."""
        return self.q.shape[1] // self.k.shape[1]

    def inputs(self) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Return queries, keys and positions, and the strides of the first two, as arguments of a kernel."""
        dtype = torch.promote_types(self.q.dtype, self.k.dtype)
        q, k = (with_rows(x.to(dtype)) for x in (self.q, self.k))
        return (q, k, self.token, self.start, self.first_key), (*q.stride()[:3], *k.stride()[:3])


@dataclass(frozen=True, slots=True)
class Compared:
    """What :func:`compare` returns: fp32, logarithms to the base 2, ``G = B * Hkv``.

    Args:
        losses: the weighted divergences ``(G, m)``.
        weights: of the queries ``(G, m)``.
        slope: the derivative of the loss in the log of the score of each block ``(G, m, M)``; unwritten after the
            query's own block, as is ``log_score``.
        log_score: of blocks ``(G, m, M)``.
        lse: of the scorer's visible keys ``(G, H, m)``.
        pull: what the keys of a head lose together ``(G, H, m)``.
    """

    losses: Tensor
    weights: Tensor
    slope: Tensor
    log_score: Tensor
    lse: Tensor
    pull: Tensor


def compare(true: Scored, scorer: Scored, width: int, config: NSAConfig, *, by_mass: bool) -> Compared:
    """Compare the true shares of ``width`` blocks with their scores."""
    of_true, _ = log_sums(true, width)
    weighted, plain = log_sums(scorer, width)
    (batch, rows), kv_heads = true.token.shape, true.k.shape[1]
    of_query, of_head = (batch * kv_heads, rows), (batch * kv_heads, scorer.heads, rows)
    losses, weights = (torch.empty(of_query, device=weighted.device) for _ in range(2))
    slope, log_score = (torch.empty(*of_query, width, device=weighted.device) for _ in range(2))
    lse, pull = (torch.empty(of_head, device=weighted.device) for _ in range(2))
    compare_blocks[(rows, batch * kv_heads)](
        of_true, weighted, plain, true.token, true.start, scorer.token, scorer.start,
        losses, weights, slope, log_score, lse, pull, rows, width,
        KV_HEADS=kv_heads, HEADS=true.heads, INDEX_HEADS=scorer.heads, **scorer.grid.constants,
        BLOCK_SIZE=true.grid.block_size, NUM_INIT=config.num_init_blocks, NUM_LOCAL=config.num_local_blocks,
        BY_MASS=by_mass, BH=padded(true.heads, 1), BI=padded(scorer.heads, 1),
        BM=min(padded(width), BLOCKS_AT_ONCE), num_warps=4,
    )  # fmt: skip
    return Compared(losses, weights, slope, log_score, lse, pull)


def log_sums(scored: Scored, width: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of blocks, ``(B * Hkv * H, m, M)``, of weighted keys and of each key once."""
    tensors, strides = scored.inputs()
    (batch, rows), (kv_heads, num_keys, head_dim) = scored.token.shape, scored.k.shape[1:]
    grid, tiles = scored.grid.constants, selection_loss_tiles(device_of(scored.q), tensors[0].dtype, head_dim)
    keys_at_once = min(padded(scored.grid.keys_of_block, 1), tiles.keys)
    blocks = tiles.keys // keys_at_once
    weighted = torch.empty(batch * scored.q.shape[1], rows, width, device=scored.q.device)
    plain = torch.empty_like(weighted) if scored.grid.keys_of_block > grid["STEP"] else weighted
    block_log_sums[(batch * kv_heads * cdiv(rows, tiles.queries) * cdiv(width, blocks),)](
        *tensors, weighted, plain, *strides, rows, num_keys, width, scored.factors[0] * LOG2_E,
        KV_HEADS=kv_heads, HEADS=scored.heads, HEAD_DIM=head_dim, WIDTH=scored.grid.keys_of_block, **grid,
        BT=tiles.queries, BJ=blocks, BW=keys_at_once, BD=padded(head_dim), INNER=scored.factors[1], **tiles.options(),
    )  # fmt: skip
    return weighted, plain


def gradients(scorer: Scored, compared: Compared, width: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of the loss in the scorer's queries ``(B, Hkv * H, m, D)`` and keys, fp32."""
    tensors, strides = scorer.inputs()
    (batch, rows), (kv_heads, num_keys, head_dim) = scorer.token.shape, scorer.k.shape[1:]
    tiles = selection_loss_tiles(device_of(scorer.q), tensors[0].dtype, head_dim)
    inputs = *tensors, compared.slope, compared.log_score, compared.lse, compared.pull
    options = scorer.grid.constants | {
        "WIDTH": scorer.grid.keys_of_block, "KV_HEADS": kv_heads, "HEADS": scorer.heads, "HEAD_DIM": head_dim,
        "BD": padded(head_dim), "BT": tiles.queries, "INNER": scorer.factors[1], **tiles.options(),
    }  # fmt: skip
    programs = cdiv(rows, tiles.queries) * batch * scorer.q.shape[1]
    # Few programs leave a GPU idle: split the keys of a tile of queries, in a fixed way, so that sums repeat.
    splits = max(1, min(cdiv(PROGRAMS * multiprocessors(scorer.q), programs), cdiv(num_keys, tiles.keys)))
    keys_at_once = min(padded(scorer.grid.constants["STEP"], 1), tiles.keys)
    dq = torch.empty(splits, batch, scorer.q.shape[1], rows, head_dim, device=scorer.q.device)
    query_gradients[(cdiv(rows, tiles.queries) * splits, batch * scorer.q.shape[1])](
        *inputs, dq, *strides, rows, num_keys, width, splits, scorer.factors[0],
        **options, BJ=tiles.keys // keys_at_once, BW=keys_at_once,
    )  # fmt: skip
    dk = torch.empty(scorer.k.shape, device=scorer.k.device)
    if num_keys:
        key_gradients[(cdiv(num_keys, tiles.keys), batch * kv_heads)](
            *inputs, dk, *strides, rows, num_keys, width, scorer.factors[0], **options, BN=tiles.keys
        )
    return dq.sum(0) if splits > 1 else dq[0], dk


@jit
def add_blocks(top, total, logs_HM):
    """Add blocks to the running sum of each head, a maximum and a sum relative to it."""
    new_top = tl.maximum(top, tl.max(logs_HM, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp2(top - shift) + tl.sum(tl.exp2(logs_HM - shift[:, None]), axis=1)


@jit
def sum_heads(logs_HM):
    """Return the logarithm of the sum over heads."""
    top = tl.max(logs_HM, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return log_of(shift, tl.sum(tl.exp2(logs_HM - shift[None, :]), axis=0))


@jit
def normalised(ptr, head, block, lse, seen, HEADS: tl.constexpr, stride_h):
    """Return the log of the probability of blocks, by head; ``-inf`` for blocks that the query does not see."""
    mask = (head < HEADS)[:, None] & seen[None, :]
    logs = tl.load(ptr + head[:, None] * stride_h + block[None, :], mask=mask, other=float("-inf"))
    return logs - tl.where(lse == float("-inf"), 0.0, lse)[:, None]


@jit(do_not_specialize=["num_rows", "width"])
def compare_blocks(
    true_ptr, weighted_ptr, plain_ptr, token_ptr, start_ptr, index_token_ptr, index_start_ptr, loss_ptr, weight_ptr,
    slope_ptr, log_score_ptr, lse_ptr, pull_ptr, num_rows, width,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr,
    BY_MASS: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compare the true shares of one query's blocks with their scores; logarithms have base 2.

    ``slope`` is the derivative of the weighted divergence in the log of each block's score. Of each index head, ``lse``
    is the log-sum-exp over its visible keys, and ``pull`` what every one of them loses in proportion to its
    probability.
    """
    row = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    position = batch_head // KV_HEADS * num_rows + row
    age = tl.load(token_ptr + position) - tl.load(start_ptr + position)  # -1 of a query that is none
    current = age // BLOCK_SIZE
    visible = count_visible(tl.load(index_token_ptr + position) - tl.load(index_start_ptr + position), LENGTH, STRIDE)
    head, index_head = tl.arange(0, BH), tl.arange(0, BI)
    stride_h = num_rows.to(tl.int64) * width
    true_ptr += (batch_head * HEADS * num_rows + row) * width
    weighted_ptr += (batch_head * INDEX_HEADS * num_rows + row) * width
    plain_ptr += (batch_head * INDEX_HEADS * num_rows + row) * width
    none = tl.full((BH,), 0.0, tl.float32)
    index_none = tl.full((BI,), 0.0, tl.float32)

    top, total = none - float("inf"), none
    index_top, index_total = index_none - float("inf"), index_none
    for first in range(0, current + 1, BM):
        block = first + tl.arange(0, BM)
        seen = block * BLOCK_SIZE <= age
        scored = tl.maximum(block * STEP + FIRST, 0) < visible
        top, total = add_blocks(top, total, normalised(true_ptr, head, block, none, seen, HEADS, stride_h))
        logs = normalised(plain_ptr, index_head, block, index_none, scored, INDEX_HEADS, stride_h)
        index_top, index_total = add_blocks(index_top, index_total, logs)
    true_lse, lse = log_of(top, total), log_of(index_top, index_total)

    # Both distributions are over the kept blocks: free ones with a key of the scorer.
    top, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    score_top, score_total = top, total
    for first in range(0, current + 1, BM):
        block = first + tl.arange(0, BM)
        counted = (block >= NUM_INIT) & (block <= current - NUM_LOCAL) & (tl.maximum(block * STEP + FIRST, 0) < visible)
        log_true = sum_heads(normalised(true_ptr, head, block, true_lse, counted, HEADS, stride_h))
        log_score = sum_heads(normalised(weighted_ptr, index_head, block, lse, counted, INDEX_HEADS, stride_h))
        top, total = add_blocks(top, total, log_true[None, :])
        score_top, score_total = add_blocks(score_top, score_total, log_score[None, :])
    log_mass, log_norm = tl.max(log_of(top, total)), tl.max(log_of(score_top, score_total))
    some = log_mass > float("-inf")
    mass = tl.where(some, tl.exp2(log_mass) / HEADS, 0.0)
    weight = mass if BY_MASS else tl.where(some, 1.0, 0.0)
    log_mass, log_norm = tl.where(some, log_mass, 0.0), tl.where(some, log_norm, 0.0)

    divergence = 0.0
    pull = index_none
    for first in range(0, current + 1, BM):
        block = first + tl.arange(0, BM)
        counted = (block >= NUM_INIT) & (block <= current - NUM_LOCAL) & (tl.maximum(block * STEP + FIRST, 0) < visible)
        log_true = sum_heads(normalised(true_ptr, head, block, true_lse, counted, HEADS, stride_h)) - log_mass
        logs = normalised(weighted_ptr, index_head, block, lse, counted, INDEX_HEADS, stride_h)
        log_score = tl.where(counted, sum_heads(logs), 0.0)
        true = tl.exp2(log_true)
        divergence += tl.sum(tl.where(true > 0, true * (log_true - log_score + log_norm), 0.0))
        slope = tl.where(counted, (tl.exp2(log_score - log_norm) - true) * weight, 0.0)
        pull += tl.sum(slope[None, :] * tl.exp2(logs - log_score[None, :]), axis=1)
        cell = (batch_head * num_rows + row) * width + block
        tl.store(slope_ptr + cell, slope, mask=block <= current)
        tl.store(log_score_ptr + cell, log_score, mask=block <= current)
    of_query = batch_head * num_rows + row
    tl.store(loss_ptr + of_query, divergence * weight * 0.6931471805599453)
    tl.store(weight_ptr + of_query, weight)
    of_head = (batch_head * INDEX_HEADS + index_head) * num_rows + row
    tl.store(lse_ptr + of_head, lse, mask=index_head < INDEX_HEADS)
    tl.store(pull_ptr + of_head, pull, mask=index_head < INDEX_HEADS)
