# pyright: standard
"""Log-sum-exp of the compressed branch, for selections without its attention output."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import cdiv, device_of, padded
from flexnsa.attention.tiles.scoring import log_sum_exp_tiles
from flexnsa.attention.triton.arguments import Factors, position_arguments, with_positive_scale
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, load_positions, runs
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions, tensors_of


def log_sum_exp(q: Tensor, k_cmp: Tensor, positions: Positions | None, config: NSAConfig, factors: Factors) -> Tensor:
    """Return the natural log-sum-exp of each query's scores over the compressed tokens that it sees.

    Args:
        q: queries ``(B, Hq, T, D)``, last dimension contiguous.
        k_cmp: compressed keys ``(B, Hkv, N, D)``, last dimension contiguous, same dtype.
        positions: of the queries; None for one whole sequence from token 0.
        config: the sizes.
        factors: of :func:`flexnsa.attention.triton.arguments.factors_of`.

    Returns:
        float32 ``(B, Hq, T)``; ``-inf`` for a query that sees no key.
    """
    q, (scale, inner) = with_positive_scale(q, factors)
    batch, q_heads, num_queries, head_dim = q.shape
    out = torch.empty(batch, q_heads, num_queries, dtype=torch.float32, device=q.device)
    tiles = log_sum_exp_tiles(device_of(q), q.dtype, head_dim)
    log_sum_exp_kernel[(batch * q_heads * cdiv(num_queries, tiles.queries),)](
        q, k_cmp, *position_arguments(q, *tensors_of(positions)), out, *q.stride()[:3], *k_cmp.stride()[:3],
        num_queries, k_cmp.shape[2], scale * LOG2_E,
        Q_HEADS=q_heads, GROUP=q_heads // k_cmp.shape[1], HEAD_DIM=head_dim, LENGTH=config.compress_block_size,
        STRIDE=config.compress_stride, HAS_POSITIONS=positions is not None,
        BLOCK_T=tiles.queries, BLOCK_N=tiles.keys, BLOCK_D=padded(head_dim), INNER=inner, **tiles.options(),
    )  # fmt: skip
    return out


@jit(do_not_specialize=["num_queries", "num_keys"])
def log_sum_exp_kernel(
    q_ptr, k_ptr, token_ptr, start_ptr, cmp_start_ptr, position_stride_b, out_ptr,
    q_stride_b, q_stride_h, q_stride_t, k_stride_b, k_stride_h, k_stride_n, num_queries, num_keys, scale_log2,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one tile of queries of one head, with a running maximum over its visible keys."""
    num_tiles = tl.cdiv(num_queries, BLOCK_T)
    first_row = tl.program_id(0) % num_tiles * BLOCK_T
    batch_head = (tl.program_id(0) // num_tiles).to(tl.int64)
    batch = batch_head // Q_HEADS
    head = batch_head % Q_HEADS
    row = tl.minimum(first_row + tl.arange(0, BLOCK_T), num_queries - 1)
    at = batch * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, num_queries, HAS_POSITIONS)
    low = tl.load(cmp_start_ptr + at + row) if HAS_POSITIONS else row * 0
    high = low + count_visible(token - start, LENGTH, STRIDE)

    dim = tl.arange(0, BLOCK_D)[None, :]
    q_ptrs = q_ptr + batch * q_stride_b + head * q_stride_h + row.to(tl.int64)[:, None] * q_stride_t + dim
    k_ptrs = k_ptr + batch * k_stride_b + (head // GROUP) * k_stride_h + dim
    q = tl.load(q_ptrs, mask=dim < HEAD_DIM, other=0.0)

    top = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    begin, full, rest, end = runs(low, tl.minimum(high, num_keys), BLOCK_N)
    for part in tl.static_range(3):
        first = begin if part == 0 else full if part == 1 else rest
        last = full if part == 0 else rest if part == 1 else end
        for first_key in tl.range(first, last, BLOCK_N):
            key = first_key + tl.arange(0, BLOCK_N)
            inside = (key[:, None] < num_keys) & (dim < HEAD_DIM)
            k = tl.load(k_ptrs + key.to(tl.int64)[:, None] * k_stride_n, mask=inside, other=0.0)
            score = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), INNER, q.dtype)
            if part != 1:
                score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1) * scale_log2)
            # Without a visible key yet the maximum is -inf; subtract 0 instead, since -inf - -inf is NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(score * scale_log2 - shift[:, None]), axis=1)
            top = new_top
    lse = tl.where(total > 0, (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, float("-inf"))
    local_row = first_row + tl.arange(0, BLOCK_T)
    tl.store(out_ptr + batch_head * num_queries + local_row, lse, mask=local_row < num_queries)
