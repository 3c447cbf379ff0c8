"""Importance of selection blocks for a few queries: the heads of a group are the rows of a product.

The kernel for many queries (:mod:`flexnsa.attention.triton.importance`) would pad one query to a whole tile and loop
over the heads. Here a program has one query, all heads of its group and a tile of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.importance import Scores
from flexnsa.attention.triton.kernels.importance_few import importance_few_kernel
from flexnsa.attention.triton.operators import position_arguments
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions, tensors_of

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
    scale: float,
) -> None:
    """Fill ``scores`` with the importance of blocks for all queries; arguments as of ``importance``."""
    batch, q_heads, num_queries, head_dim = q.shape
    kv_heads, num_keys = k_cmp.shape[1:3]
    group, band = q_heads // kv_heads, scores.band
    importance_few_kernel[(batch * kv_heads * num_queries * cdiv(scores.width, BLOCK_J),)](
        q,
        k_cmp,
        lse,
        *position_arguments(q, *tensors_of(positions)),
        scores.own,
        scores.passed,
        *q.stride()[:3],
        *k_cmp.stride()[:3],
        *lse.stride()[:2],
        num_queries,
        num_keys,
        scores.width,
        scale * LOG2_E,
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
        HAS_POSITIONS=positions is not None,
        BLOCK_G=padded(group),
        BLOCK_J=BLOCK_J,
        BLOCK_D=padded(head_dim),
        num_warps=8 if q.dtype == torch.float32 else 1,
    )
