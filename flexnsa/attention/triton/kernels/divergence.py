# pyright: standard, reportGeneralTypeIssues=false
"""Divergence of two distributions over blocks at one query; see :mod:`flexnsa.attention.triton.divergence`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.block_log_sums import log_of
from flexnsa.attention.triton.kernels.visible import count_visible
from flexnsa.attention.triton.typed import jit


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
    true_ptr,
    weighted_ptr,
    plain_ptr,
    token_ptr,
    start_ptr,
    index_token_ptr,
    index_start_ptr,
    loss_ptr,
    weight_ptr,
    slope_ptr,
    log_score_ptr,
    lse_ptr,
    pull_ptr,
    num_rows,
    width,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BY_MASS: tl.constexpr,
    BH: tl.constexpr,
    BI: tl.constexpr,
    BM: tl.constexpr,
):
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
        kept = (block >= NUM_INIT) & (block <= current - NUM_LOCAL) & (tl.maximum(block * STEP + FIRST, 0) < visible)
        log_true = sum_heads(normalised(true_ptr, head, block, true_lse, kept, HEADS, stride_h))
        log_score = sum_heads(normalised(weighted_ptr, index_head, block, lse, kept, INDEX_HEADS, stride_h))
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
        kept = (block >= NUM_INIT) & (block <= current - NUM_LOCAL) & (tl.maximum(block * STEP + FIRST, 0) < visible)
        log_true = sum_heads(normalised(true_ptr, head, block, true_lse, kept, HEADS, stride_h)) - log_mass
        logs = normalised(weighted_ptr, index_head, block, lse, kept, INDEX_HEADS, stride_h)
        log_score = tl.where(kept, sum_heads(logs), 0.0)
        true = tl.exp2(log_true)
        divergence += tl.sum(tl.where(true > 0, true * (log_true - log_score + log_norm), 0.0))
        slope = tl.where(kept, (tl.exp2(log_score - log_norm) - true) * weight, 0.0)
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
