# pyright: standard, reportGeneralTypeIssues=false
"""Gradients of the divergence in index queries and keys; see :mod:`flexnsa.attention.triton.divergence`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.block_log_sums import shared_strides
from flexnsa.attention.triton.kernels.visible import count_visible
from flexnsa.attention.triton.typed import jit


@jit
def score_gradient(
    score_TN, key, first_key, visible, lse, pull, slope_ptrs, log_score_ptrs,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the derivative of the loss in the scores of a tile, given these and what belongs to each query.

    A key's probability, as a part of its block's score, follows the block's slope; as a part of its head's sum over all
    keys it loses ``pull``.
    """
    place = key[None, :] - first_key[:, None]
    seen = (place >= 0) & (place < visible[:, None])
    log_p = tl.where(seen, score_TN - tl.where(lse == float("-inf"), 0.0, lse)[:, None], float("-inf"))
    gradient = -pull[:, None] * tl.exp2(log_p)
    from_first = tl.maximum(place - FIRST, 0)
    for before in tl.static_range(0, WIDTH, STEP):  # the last block that has the key, and those before it
        block = from_first // STEP - before // STEP
        from_block = from_first % STEP + before
        counted = seen & (block >= 0) & (from_block < WIDTH)
        weight = tl.maximum(shared_strides(from_block + FIRST, LENGTH, STRIDE, STEP), 1).to(tl.float32)
        slope = tl.load(slope_ptrs[:, None] + block, mask=counted, other=0.0)
        log_score = tl.load(log_score_ptrs[:, None] + block, mask=counted, other=0.0)
        gradient += weight * slope * tl.exp2(log_p - log_score)
    return gradient


@jit(do_not_specialize=["num_rows", "num_keys", "width", "splits"])
def query_gradients(
    q_ptr,
    k_ptr,
    token_ptr,
    start_ptr,
    first_key_ptr,
    slope_ptr,
    log_score_ptr,
    lse_ptr,
    pull_ptr,
    out_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    num_rows,
    num_keys,
    width,
    splits,
    scale,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Sum over one split of the keys, for a tile of queries of one index head; ``out (splits, B * Hkv * H, m, D)``."""
    num_tiles = tl.cdiv(num_rows, BT)
    tile = tl.program_id(0) % num_tiles * BT + tl.arange(0, BT)
    split = tl.program_id(0) // num_tiles
    head = tl.program_id(1).to(tl.int64)
    batch_head = head // HEADS
    batch = batch_head // KV_HEADS

    row = tl.minimum(tile, num_rows - 1)
    position = batch * num_rows + row
    visible = count_visible(token_ptr + position, start_ptr + position, LENGTH, STRIDE)
    first_key = tl.load(first_key_ptr + position)
    dim = tl.arange(0, BD)[None, :]
    q_base = q_ptr + batch * q_stride_b + head % (KV_HEADS * HEADS) * q_stride_h
    q = tl.load(q_base + row.to(tl.int64)[:, None] * q_stride_t + dim, mask=dim < HEAD_DIM, other=0.0)
    k_ptrs = k_ptr + batch * k_stride_b + batch_head % KV_HEADS * k_stride_h + dim
    lse = tl.load(lse_ptr + head * num_rows + row)
    pull = tl.load(pull_ptr + head * num_rows + row)
    of_query = (batch_head * num_rows + row) * width

    low, high = tl.min(first_key), tl.minimum(tl.max(first_key + visible), num_keys)
    span = tl.cdiv(tl.cdiv(high - low, BN), splits) * BN
    dq = tl.zeros((BT, BD), tl.float32)
    for at in range(low + split * span, tl.minimum(low + (split + 1) * span, high), BN):
        key = at + tl.arange(0, BN)
        inside = (key < num_keys)[:, None] & (dim < HEAD_DIM)
        k = tl.load(k_ptrs + key.to(tl.int64)[:, None] * k_stride_n, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        gradient = score_gradient(
            score, key, first_key, visible, lse, pull, slope_ptr + of_query, log_score_ptr + of_query,
            LENGTH, STRIDE, STEP, FIRST, WIDTH,
        )  # fmt: skip
        dq += tl.dot(gradient.to(k.dtype), k, input_precision="ieee")
    cell = ((split * tl.num_programs(1) + head) * num_rows + tile[:, None]) * HEAD_DIM + dim
    tl.store(out_ptr + cell, dq * scale, mask=(tile < num_rows)[:, None] & (dim < HEAD_DIM))


@jit(do_not_specialize=["num_rows", "num_keys", "width"])
def key_gradients(
    q_ptr,
    k_ptr,
    token_ptr,
    start_ptr,
    first_key_ptr,
    slope_ptr,
    log_score_ptr,
    lse_ptr,
    pull_ptr,
    out_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    num_rows,
    num_keys,
    width,
    scale,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Sum over all queries and index heads, for a tile of keys; ``out (B * Hkv, N, D)``."""
    first = tl.program_id(0) * BN
    key = first + tl.arange(0, BN)
    batch_head = tl.program_id(1).to(tl.int64)
    batch = batch_head // KV_HEADS
    dim = tl.arange(0, BD)[None, :]
    inside = (key < num_keys)[:, None] & (dim < HEAD_DIM)
    k_base = k_ptr + batch * k_stride_b + batch_head % KV_HEADS * k_stride_h
    k = tl.load(k_base + key.to(tl.int64)[:, None] * k_stride_n + dim, mask=inside, other=0.0)
    q_base = q_ptr + batch * q_stride_b + batch_head % KV_HEADS * HEADS * q_stride_h + dim

    dk = tl.zeros((BN, BD), tl.float32)
    for first_row in range(0, num_rows, BT):
        tile = first_row + tl.arange(0, BT)
        row = tl.minimum(tile, num_rows - 1)
        position = batch * num_rows + row
        visible = count_visible(token_ptr + position, start_ptr + position, LENGTH, STRIDE)
        first_key = tl.load(first_key_ptr + position)
        visible = tl.where(tile < num_rows, visible, 0)
        if (tl.max(first_key + visible) > first) & (tl.min(first_key) < first + BN):
            q_ptrs = q_base + row.to(tl.int64)[:, None] * q_stride_t
            of_query = (batch_head * num_rows + row) * width
            for h in range(HEADS):
                q = tl.load(q_ptrs + h * q_stride_h, mask=dim < HEAD_DIM, other=0.0)
                of_head = (batch_head * HEADS + h) * num_rows + row
                lse, pull = tl.load(lse_ptr + of_head), tl.load(pull_ptr + of_head)
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
                gradient = score_gradient(
                    score, key, first_key, visible, lse, pull, slope_ptr + of_query, log_score_ptr + of_query,
                    LENGTH, STRIDE, STEP, FIRST, WIDTH,
                )  # fmt: skip
                dk += tl.dot(tl.trans(gradient).to(q.dtype), q, input_precision="ieee")
    tl.store(out_ptr + (batch_head * num_keys + key[:, None]) * HEAD_DIM + dim, dk * scale, mask=inside)
