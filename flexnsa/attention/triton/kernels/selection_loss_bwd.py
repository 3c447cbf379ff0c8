# pyright: standard, reportGeneralTypeIssues=false
"""Gradients of the divergence in index queries and keys; see :mod:`flexnsa.attention.triton.selection_loss`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.block_log_sums import shared_strides
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, through_cap


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


@jit
def block_gradients(
    log_p, block, piece, width, slope_ptrs, log_score_ptrs,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    BJ: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Return what the slopes of blocks give to the scores of ``BW`` keys of ``BJ`` blocks, from ``piece`` on.

    A key's probability, ``log_p (T, BJ * BW)``, is a part of the score of its block, and of those before that it
    overlaps. Slopes and scores are read once for all keys of a block.
    """
    log_p_TJW = tl.reshape(log_p, (log_p.shape[0], BJ, BW))
    gradient_TJW = tl.zeros_like(log_p_TJW)
    for before in tl.static_range(0, WIDTH, STEP):  # the last block that has the key, and those before it
        at = (block - before // STEP)[None, :]
        exists = (at >= 0) & (at < width)
        slope = tl.load(slope_ptrs[:, None] + at, mask=exists, other=0.0)[:, :, None]
        log_score = tl.load(log_score_ptrs[:, None] + at, mask=exists, other=0.0)[:, :, None]
        offset = piece + tl.arange(0, BW) + before
        weight = tl.maximum(shared_strides(offset + FIRST, LENGTH, STRIDE, STEP), 1).to(tl.float32)[None, None, :]
        # Blocks after the query's own are unwritten, and have no visible key.
        counted = (log_p_TJW > float("-inf")) & exists[:, :, None] & (offset < WIDTH)[None, None, :]
        gradient_TJW += tl.where(counted, weight * slope * tl.exp2(log_p_TJW - log_score), 0.0)
    return tl.reshape(gradient_TJW, log_p.shape)


@jit(do_not_specialize=["num_rows", "num_keys", "width", "splits"])
def query_gradients(
    q_ptr, k_ptr, token_ptr, start_ptr, first_key_ptr, slope_ptr, log_score_ptr, lse_ptr, pull_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, num_rows, num_keys, width, splits, scale,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sum over one split of the blocks, for a tile of queries of one index head; ``out (splits, B * Hkv * H, m, D)``.

    A key belongs to the last block for which it counts: ``BW`` keys of ``BJ`` blocks are a tile.
    """
    num_tiles = tl.cdiv(num_rows, BT)
    tile = tl.program_id(0) % num_tiles * BT + tl.arange(0, BT)
    split = tl.program_id(0) // num_tiles
    head = tl.program_id(1).to(tl.int64)
    batch_head = head // HEADS
    batch = batch_head // KV_HEADS

    row = tl.minimum(tile, num_rows - 1)
    position = batch * num_rows + row
    visible = count_visible(tl.load(token_ptr + position) - tl.load(start_ptr + position), LENGTH, STRIDE)
    first_key = tl.load(first_key_ptr + position)
    dim = tl.arange(0, BD)[None, :]
    q_base = q_ptr + batch * q_stride_b + head % (KV_HEADS * HEADS) * q_stride_h
    q = tl.load(q_base + row.to(tl.int64)[:, None] * q_stride_t + dim, mask=dim < HEAD_DIM, other=0.0)
    k_ptrs = k_ptr + batch * k_stride_b + batch_head % KV_HEADS * k_stride_h + dim
    lse = tl.load(lse_ptr + head * num_rows + row)
    pull = tl.load(pull_ptr + head * num_rows + row)
    of_query = (batch_head * num_rows + row) * width

    lane = tl.arange(0, BJ * BW)
    dq = tl.zeros((BT, BD), tl.float32)
    document = tl.min(first_key)
    last_document = tl.max(first_key)
    # Block grids restart at each document, so loop over the documents of the query tile, usually one.
    while document <= last_document:
        visible_here = tl.where(first_key == document, visible, 0)
        num_blocks = tl.cdiv(tl.max(visible_here) - FIRST, STEP)
        span = tl.cdiv(tl.cdiv(num_blocks, BJ), splits) * BJ
        for first_block in range(split * span, tl.minimum((split + 1) * span, num_blocks), BJ):
            block = first_block + tl.arange(0, BJ)
            for piece in tl.static_range(0, STEP, BW):
                offset = piece + lane % BW
                place = (first_block + lane // BW) * STEP + offset + FIRST
                inside = (offset < STEP) & (place >= 0) & (document + place < num_keys)
                ptrs = k_ptrs + (document + place).to(tl.int64)[:, None] * k_stride_n
                k = tl.load(ptrs, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0)
                s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), INNER, q.dtype)
                score = s * (scale * 1.4426950408889634)
                seen = inside[None, :] & (place[None, :] < visible_here[:, None])
                log_p = tl.where(seen, score - tl.where(lse == float("-inf"), 0.0, lse)[:, None], float("-inf"))
                of_blocks = block_gradients(
                    log_p, block, piece, width, slope_ptr + of_query, log_score_ptr + of_query,
                    LENGTH, STRIDE, STEP, FIRST, WIDTH, BJ, BW,
                )  # fmt: skip
                gradient = through_cap(of_blocks - pull[:, None] * tl.exp2(log_p), s, INNER)
                dq += tl.dot(gradient.to(k.dtype), k, input_precision="ieee")
        document = tl.min(tl.where(first_key > document, first_key, 2147483647))
    cell = ((split * tl.num_programs(1) + head) * num_rows + tile[:, None]) * HEAD_DIM + dim
    scale = scale * INNER if INNER != 0.0 else scale
    tl.store(out_ptr + cell, dq * scale, mask=(tile < num_rows)[:, None] & (dim < HEAD_DIM))


@jit(do_not_specialize=["num_rows", "num_keys", "width"])
def key_gradients(
    q_ptr, k_ptr, token_ptr, start_ptr, first_key_ptr, slope_ptr, log_score_ptr, lse_ptr, pull_ptr, out_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, num_rows, num_keys, width, scale,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
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
        visible = count_visible(tl.load(token_ptr + position) - tl.load(start_ptr + position), LENGTH, STRIDE)
        first_key = tl.load(first_key_ptr + position)
        visible = tl.where(tile < num_rows, visible, 0)
        if (tl.max(first_key + visible) > first) & (tl.min(first_key) < first + BN):
            q_ptrs = q_base + row.to(tl.int64)[:, None] * q_stride_t
            of_query = (batch_head * num_rows + row) * width
            for h in range(HEADS):
                q = tl.load(q_ptrs + h * q_stride_h, mask=dim < HEAD_DIM, other=0.0)
                of_head = (batch_head * HEADS + h) * num_rows + row
                lse, pull = tl.load(lse_ptr + of_head), tl.load(pull_ptr + of_head)
                s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), INNER, q.dtype)
                score = s * (scale * 1.4426950408889634)
                gradient = score_gradient(
                    score, key, first_key, visible, lse, pull, slope_ptr + of_query, log_score_ptr + of_query,
                    LENGTH, STRIDE, STEP, FIRST, WIDTH,
                )  # fmt: skip
                dk += tl.dot(tl.trans(through_cap(gradient, s, INNER)).to(q.dtype), q, input_precision="ieee")
    scale = scale * INNER if INNER != 0.0 else scale
    tl.store(out_ptr + (batch_head * num_keys + key[:, None]) * HEAD_DIM + dim, dk * scale, mask=inside)
