"""Log-sum-exp of the compressed branch alone, for callers that want a selection and have no attention output."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp_kernel
from flexnsa.attention.triton.tiles import cdiv, padded
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions


def log_sum_exp(q: Tensor, k_cmp: Tensor, positions: Positions, *, config: NSAConfig, scale: float) -> Tensor:
    """Give the natural log-sum-exp of the scores of every query over the compressed tokens that it sees.

    Args:
        q: queries ``(B, Hq, T, D)``, last dimension contiguous.
        k_cmp: compressed keys ``(B, Hkv, N, D)``, last dimension contiguous, same dtype.
        positions: where the queries stand.
        config: the sizes.
        scale: factor on the scores.

    Returns:
        float32 ``(B, Hq, T)``; ``-inf`` for a query that sees nothing.
    """
    batch, q_heads, num_queries, head_dim = q.shape
    out = torch.empty(batch, q_heads, num_queries, dtype=torch.float32, device=q.device)
    block_d = padded(head_dim)
    small = q.dtype == torch.float32 or block_d > 128
    block_t, block_n = (32, 32) if small else (128, 128)
    log_sum_exp_kernel[(batch * q_heads * cdiv(num_queries, block_t),)](
        q,
        k_cmp,
        positions.token,
        positions.start,
        positions.cmp_start,
        out,
        *q.stride()[:3],
        *k_cmp.stride()[:3],
        positions.token.stride(0) if positions.token.shape[0] > 1 else 0,
        num_queries,
        k_cmp.shape[2],
        scale * 1.4426950408889634,
        Q_HEADS=q_heads,
        GROUP=q_heads // k_cmp.shape[1],
        HEAD_DIM=head_dim,
        LENGTH=config.compress_block_size,
        STRIDE=config.compress_stride,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=4 if small else 8,
        num_stages=2,
    )
    return out
