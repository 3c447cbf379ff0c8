"""Blocks scored by products of index queries and index keys, which all heads share, in place of the mass of a softmax.

The best key of a block counts in MSA (arXiv 2606.13392), for each index query. A block of QSA has one key, and its
positive products with all index queries are added up.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.attention.shares import by_blocks, columns_from, grouped_products
from flexnsa.config import NSAConfig
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.positions import Positions


def key_products(q: Tensor, k: Tensor, positions: Positions, call: Call) -> Tensor:
    """Return ``scale * q.k``, ``-inf`` for hidden keys: ``(B, Hkv, 1, T, N)`` in MSA, ``(B, 1, H, T, N)`` in QSA."""
    products = grouped_products(q, k, call.scale)
    key = torch.arange(k.shape[2], dtype=torch.int32, device=q.device)
    hidden = compressed_intervals(positions, call.config).hide(key)[:, None, None]
    return (products.transpose(1, 2) if call.config.index_score == "max" else products).masked_fill(hidden, -torch.inf)


def scores_of_products(products: Tensor, positions: Positions, blocks: int, config: NSAConfig) -> Tensor:
    """Score blocks, ``(B, Hkv or 1, T, M)``; ``-inf`` for those without a visible key."""
    of_blocks = _by_blocks(products, positions, blocks, config)
    best = of_blocks.amax((2, -1))
    return best if config.index_score == "max" else of_blocks.relu().sum((2, -1)).where(best > -torch.inf, best)


def scores_to_rank(q: Tensor, k: Tensor, positions: Positions, blocks: int, call: Call) -> Tensor:
    """Score blocks for a top-n, in fp32 and without the scale, which might round two scores to one."""
    products = key_products(q, k, positions, replace(call, scale=1.0))
    return scores_of_products(products, positions, blocks, call.config).to(torch.float32)


def differentiate_products(products: Tensor, slope: Tensor, positions: Positions, config: NSAConfig) -> Tensor:
    """Return the derivatives in the products, given those in the scores of blocks ``(B, Hkv or 1, T, M)``."""
    of_blocks, slope = _by_blocks(products, positions, slope.shape[-1], config), slope[:, :, None, ..., None]
    if config.index_score == "max":
        in_blocks = torch.zeros_like(of_blocks).scatter_(-1, of_blocks.argmax(-1, keepdim=True), slope)
    else:
        in_blocks = slope * (of_blocks > 0)
    in_blocks = in_blocks.flatten(-2)
    columns = columns_from(positions.cmp_start, in_blocks.shape[-1], products.shape[-1]).to(torch.int64)
    index = columns[:, None, None].expand_as(in_blocks)
    return F.pad(torch.zeros_like(products), (0, 1)).scatter_add_(-1, index, in_blocks)[..., :-1]


def _by_blocks(products: Tensor, positions: Positions, blocks: int, config: NSAConfig) -> Tensor:
    return by_blocks(products, positions.cmp_start, blocks, config.strides_per_block, aligned=positions.aligned)
