# pyright: standard, reportArgumentType=false
"""Importance of selection blocks for a few queries: the heads of a group are the rows of a product.

The kernel for many queries (:mod:`flexnsa.attention.triton.kernels.importance`) would pad one query to a whole tile and
loop over the heads. Here a program has one query, all heads of its group and a tile of blocks.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.arguments import Factors, position_arguments
from flexnsa.attention.triton.kernels.importance import Scores
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, load_positions, place_in_scores
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions, tensors_of

BLOCK_J = 16
"""Blocks per program: the fewest columns of a tensor core product, for as many programs as possible."""


def importance_few(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    positions: Positions | None,
    scores: Scores,
    *,
    config: NSAConfig,
    factors: Factors,
) -> None:
    """Fill ``scores`` with the importance of blocks for all queries; arguments as of ``importance``."""
    (batch, q_heads, num_queries, head_dim), (kv_heads, num_keys) = q.shape, k_cmp.shape[1:3]
    group, band, (scale, inner) = q_heads // kv_heads, scores.band, factors
    importance_few_kernel[(batch * kv_heads * num_queries * cdiv(scores.width, BLOCK_J),)](
        q, k_cmp, lse, *position_arguments(q, *tensors_of(positions)), scores.own, scores.passed,
        *q.stride()[:3], *k_cmp.stride()[:3], *lse.stride()[:2], num_queries, num_keys, scores.width, scale * LOG2_E,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, **band.constants(config), FIRST=band.first,
        NUM_OFFSETS=len(band.own), HAS_POSITIONS=positions is not None, BLOCK_G=padded(group), BLOCK_J=BLOCK_J,
        BLOCK_D=padded(head_dim), INNER=inner, num_warps=8 if q.dtype == torch.float32 else 1,
    )  # fmt: skip


@jit(do_not_specialize=["num_rows", "num_keys", "width"])
def importance_few_kernel(
    q_ptr, k_ptr, lse_ptr, token_ptr, start_ptr, cmp_start_ptr, position_stride_b, own_ptr, passed_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, lse_stride_b, lse_stride_h,
    num_rows, num_keys, width, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    RATIO: tl.constexpr, FIRST: tl.constexpr, NUM_OFFSETS: tl.constexpr, OWN: tl.constexpr, PASSED: tl.constexpr,
    HAS_PASSED: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Score a tile of blocks for one query and one kv head."""
    row, first_block, batch_head = place_in_scores(num_rows, width, 1, BLOCK_J)
    batch = batch_head // KV_HEADS
    first_head = batch_head % KV_HEADS * GROUP

    at = batch * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, num_rows, HAS_POSITIONS)
    visible = count_visible(token - start, LENGTH, STRIDE)
    if first_block * RATIO + FIRST >= visible:
        return

    head = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)[None, :]
    q_base = q_ptr + batch * q_stride_b + row.to(tl.int64) * q_stride_t
    q_ptrs = q_base + (first_head + head[:, None]) * q_stride_h + dim
    q = tl.load(q_ptrs, mask=(head[:, None] < GROUP) & (dim < HEAD_DIM), other=0.0)
    # A padding head gets lse = inf, so that its probabilities are 0.
    lse_ptrs = lse_ptr + batch * lse_stride_b + (first_head + head) * lse_stride_h + row
    lse_log2 = tl.load(lse_ptrs, mask=head < GROUP, other=float("inf")) * 1.4426950408889634

    key = (first_block + tl.arange(0, BLOCK_J)) * RATIO + FIRST
    document = tl.load(cmp_start_ptr + at + row) if HAS_POSITIONS else 0
    k_ptrs = k_ptr + batch * k_stride_b + batch_head % KV_HEADS * k_stride_h + dim
    own = tl.zeros((BLOCK_J,), tl.float32)
    passed = tl.zeros((BLOCK_J,), tl.float32)
    for o in tl.static_range(NUM_OFFSETS):  # pyright: ignore[reportGeneralTypeIssues]
        index = document + key + o
        shown = (key + o >= 0) & (key + o < visible) & (index < num_keys)
        inside = shown[:, None] & (dim < HEAD_DIM)
        k = tl.load(k_ptrs + index.to(tl.int64)[:, None] * k_stride_n, mask=inside, other=0.0)
        score = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), INNER, q.dtype)
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
