# pyright: standard, reportGeneralTypeIssues=false
"""Log-sum-exp of the keys of each block, for a tile of queries; see :mod:`flexnsa.attention.triton.selection_loss`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, place_in_scores


@jit
def shared_strides(offset, LENGTH: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr):
    """Return how many strides the key at ``offset`` from a block's first own key shares with the block (Eq. 9)."""
    return tl.minimum(offset + LENGTH // STRIDE, STEP) - tl.maximum(offset, 0)


@jit
def add_keys(top, total, score_TN, BJ: tl.constexpr, BW: tl.constexpr):
    """Add keys to running sums of ``BJ`` blocks, each a maximum and a sum relative to it."""
    score_TJW = tl.reshape(score_TN, (score_TN.shape[0], BJ, BW))
    new_top = tl.maximum(top, tl.max(score_TJW, axis=2))
    # Without a visible key yet the maximum is -inf; subtract 0 instead, since -inf - -inf is NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(score_TJW - shift[:, :, None]), axis=2)
    return new_top, total


@jit
def log_of(top, total):
    """Return the logarithm (base 2) of a running sum, ``-inf`` of an empty one."""
    return tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@jit(do_not_specialize=["num_rows", "num_keys", "width"])
def block_log_sums(
    q_ptr, k_ptr, token_ptr, start_ptr, first_key_ptr, weighted_ptr, plain_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, num_rows, num_keys, width, scale_log2,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, BJ: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sum the keys of ``BJ`` blocks for a tile of queries, head by head; blocks without a visible key stay unwritten.

    ``weighted`` counts each key of a block with its weight, ``plain`` the block's first ``STEP`` keys once, so that
    every key is in one block.
    """
    row0, first_block, batch_head = place_in_scores(num_rows, width, BT, BJ)
    tile = row0 + tl.arange(0, BT)
    batch = batch_head // KV_HEADS
    kv_head = batch_head % KV_HEADS

    # Rows past the end repeat the last one, so that only the stores need a mask.
    row = tl.minimum(tile, num_rows - 1)
    position = batch * num_rows + row
    visible = count_visible(tl.load(token_ptr + position) - tl.load(start_ptr + position), LENGTH, STRIDE)
    if tl.maximum(first_block * STEP + FIRST, 0) >= tl.max(visible):
        return

    dim = tl.arange(0, BD)[None, :]
    q_ptrs = q_ptr + batch * q_stride_b + row.to(tl.int64)[:, None] * q_stride_t + dim
    k_ptrs = k_ptr + batch * k_stride_b + kv_head * k_stride_h + dim
    block = first_block + tl.arange(0, BJ)
    # With BW narrower than a block its keys come in pieces; offsets count from the block's first own key.
    lane = tl.arange(0, BJ * BW)
    place = (first_block + lane // BW) * STEP + FIRST + lane % BW
    first_key = tl.load(first_key_ptr + position)
    document = tl.min(first_key)
    last_document = tl.max(first_key)
    # Block grids restart at each document, so loop over the documents of the query tile, usually one.
    while document <= last_document:
        visible_here = tl.where(first_key == document, visible, 0)
        cell = tile[:, None].to(tl.int64) * width + block[None, :]
        stored = (first_key == document)[:, None] & (tile < num_rows)[:, None] & (block < width)[None, :]
        for h in range(HEADS):
            q = tl.load(q_ptrs + (kv_head * HEADS + h) * q_stride_h, mask=dim < HEAD_DIM, other=0.0)
            top = tl.full((BT, BJ), float("-inf"), tl.float32)
            total = tl.zeros((BT, BJ), tl.float32)
            plain_top, plain_total = top, total
            for piece in range(0, WIDTH, BW):
                key = place + piece
                offset = FIRST + piece + lane % BW
                inside = (key >= 0) & (document + key < num_keys) & (offset - FIRST < WIDTH)
                ptrs = k_ptrs + (document + key).to(tl.int64)[:, None] * k_stride_n
                k = tl.load(ptrs, mask=inside[:, None] & (dim < HEAD_DIM), other=0.0)
                score = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), INNER, q.dtype) * scale_log2
                score = tl.where(inside[None, :] & (key[None, :] < visible_here[:, None]), score, float("-inf"))
                if WIDTH > STEP:
                    once = tl.where((offset - FIRST < STEP)[None, :], score, float("-inf"))
                    plain_top, plain_total = add_keys(plain_top, plain_total, once, BJ, BW)
                    weight = tl.maximum(shared_strides(offset, LENGTH, STRIDE, STEP), 1)
                    score += tl.log2(weight.to(tl.float32))[None, :]
                top, total = add_keys(top, total, score, BJ, BW)
            of_head = (batch_head * HEADS + h) * num_rows * width
            tl.store(weighted_ptr + of_head + cell, log_of(top, total), mask=stored)
            if WIDTH > STEP:
                tl.store(plain_ptr + of_head + cell, log_of(plain_top, plain_total), mask=stored)
        document = tl.min(tl.where(first_key > document, first_key, 2147483647))
