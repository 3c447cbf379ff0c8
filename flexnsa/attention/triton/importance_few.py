"""Importance of selection blocks for a few queries: the heads of a group are the rows of a product.

The kernel for many queries (:mod:`flexnsa.attention.triton.importance`) would fill a tile with one query and go
through the heads one by one. Here a program has one query, all heads of its group and a tile of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexnsa.attention.triton.importance import Scores
from flexnsa.attention.triton.visible import count_visible
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions

BLOCK_J = 16
"""Blocks of a program: the fewest columns of a tensor core's product, for as many programs as can be."""


@triton.jit(do_not_specialize=["num_rows", "num_keys", "width"])
def importance_few_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    token_ptr,
    start_ptr,
    cmp_start_ptr,
    own_ptr,
    passed_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    k_stride_b,
    k_stride_h,
    k_stride_n,
    lse_stride_b,
    lse_stride_h,
    position_stride_b,
    num_rows,
    num_keys,
    width,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    RATIO: tl.constexpr,
    FIRST: tl.constexpr,
    NUM_OFFSETS: tl.constexpr,
    OWN: tl.constexpr,
    PASSED: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score a tile of blocks for one query and one kv head."""
    num_tiles = tl.cdiv(width, BLOCK_J)
    first_block = tl.program_id(0) % num_tiles * BLOCK_J
    row = tl.program_id(0) // num_tiles % num_rows
    batch_head = (tl.program_id(0) // num_tiles // num_rows).to(tl.int64)
    batch = batch_head // KV_HEADS
    first_head = batch_head % KV_HEADS * GROUP

    position = batch * position_stride_b + row
    visible = count_visible(token_ptr + position, start_ptr + position, LENGTH, STRIDE)
    if first_block * RATIO + FIRST >= visible:
        return

    head = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)[None, :]
    q_ptrs = q_ptr + batch * q_stride_b + (first_head + head[:, None]) * q_stride_h + row * q_stride_t + dim
    q = tl.load(q_ptrs, mask=(head[:, None] < GROUP) & (dim < HEAD_DIM), other=0.0)
    # A head that is padding has probabilities exp(-inf).
    lse_ptrs = lse_ptr + batch * lse_stride_b + (first_head + head) * lse_stride_h + row
    lse_log2 = tl.load(lse_ptrs, mask=head < GROUP, other=float("inf")) * 1.4426950408889634

    key = (first_block + tl.arange(0, BLOCK_J)) * RATIO + FIRST
    document = tl.load(cmp_start_ptr + position)
    k_ptrs = k_ptr + batch * k_stride_b + batch_head % KV_HEADS * k_stride_h + dim
    own = tl.zeros((BLOCK_J,), tl.float32)
    passed = tl.zeros((BLOCK_J,), tl.float32)
    for o in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
        index = document + key + o
        shown = (key + o >= 0) & (key + o < visible) & (index < num_keys)
        inside = shown[:, None] & (dim < HEAD_DIM)
        k = tl.load(k_ptrs + index.to(tl.int64)[:, None] * k_stride_n, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        p = tl.where(shown[None, :], tl.exp2(tl.fma(score, scale_log2, -lse_log2[:, None])), 0.0)
        total = tl.sum(p, axis=0)
        own += total * OWN[o]
        if PASSED[o] > 0:
            passed += total * PASSED[o]

    block = first_block + tl.arange(0, BLOCK_J)
    cell = (batch_head * num_rows + row) * tl.multiple_of(width, 16) + block
    tl.store(own_ptr + cell, own, mask=block < width)
    if HAS_PASSED:
        tl.store(passed_ptr + cell, passed, mask=block < width)


def importance_few(
    q: Tensor, k_cmp: Tensor, lse: Tensor, positions: Positions, scores: Scores, *, config: NSAConfig, scale: float
) -> None:
    """Fill ``scores`` with the importance of blocks for all queries; arguments as for ``importance``."""
    batch, q_heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k_cmp.shape[1:3]
    group, band = q_heads // kv_heads, scores.band
    launch: Any = importance_few_kernel[(batch * kv_heads * num_queries * triton.cdiv(scores.width, BLOCK_J),)]
    launch(
        q,
        k_cmp,
        lse,
        positions.token,
        positions.start,
        positions.cmp_start,
        scores.own,
        scores.passed,
        *q.stride()[:3],
        *k_cmp.stride()[:3],
        *lse.stride()[:2],
        positions.token.stride(0) if positions.token.shape[0] > 1 else 0,
        num_queries,
        num_keys,
        scores.width,
        scale * 1.4426950408889634,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        LENGTH=config.compress_block_size,
        STRIDE=config.compress_stride,
        RATIO=config.select_block_size // config.compress_stride,
        FIRST=band.first,
        NUM_OFFSETS=len(band.own),
        OWN=band.own,
        PASSED=band.passed,
        HAS_PASSED=any(band.passed),
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_J=BLOCK_J,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=8 if q.dtype == torch.float32 else 1,
    )
