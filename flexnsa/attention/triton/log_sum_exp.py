"""Log-sum-exp of the compressed branch, for selections without its attention output."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import cdiv, device_of, padded
from flexnsa.attention.tiles.scoring import log_sum_exp_tiles
from flexnsa.attention.triton.kernels.log_sum_exp import log_sum_exp_kernel
from flexnsa.attention.triton.operators import position_arguments, with_positive_scale
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions, tensors_of


def log_sum_exp(q: Tensor, k_cmp: Tensor, positions: Positions | None, *, config: NSAConfig, scale: float) -> Tensor:
    """Return the natural log-sum-exp of each query's scores over the compressed tokens that it sees.

    Args:
        q: queries ``(B, Hq, T, D)``, last dimension contiguous.
        k_cmp: compressed keys ``(B, Hkv, N, D)``, last dimension contiguous, same dtype.
        positions: of the queries; None for one whole sequence from token 0.
        config: the sizes.
        scale: factor on the scores.

    Returns:
        float32 ``(B, Hq, T)``; ``-inf`` for a query that sees no key.
    """
    q, scale = with_positive_scale(q, scale)
    batch, q_heads, num_queries, head_dim = q.shape
    out = torch.empty(batch, q_heads, num_queries, dtype=torch.float32, device=q.device)
    tiles = log_sum_exp_tiles(device_of(q), q.dtype, head_dim)
    log_sum_exp_kernel[(batch * q_heads * cdiv(num_queries, tiles.queries),)](
        q,
        k_cmp,
        *position_arguments(q, *tensors_of(positions)),
        out,
        *q.stride()[:3],
        *k_cmp.stride()[:3],
        num_queries,
        k_cmp.shape[2],
        scale * LOG2_E,
        Q_HEADS=q_heads,
        GROUP=q_heads // k_cmp.shape[1],
        HEAD_DIM=head_dim,
        LENGTH=config.compress_block_size,
        STRIDE=config.compress_stride,
        HAS_POSITIONS=positions is not None,
        BLOCK_T=tiles.queries,
        BLOCK_N=tiles.keys,
        BLOCK_D=padded(head_dim),
        **tiles.options(),
    )
    return out
