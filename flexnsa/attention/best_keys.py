"""Blocks scored by their best key, as MSA does (arXiv 2606.13392), in place of the mass of a softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.shares import by_blocks, columns_of_tokens, grouped_products
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions


def products_of_heads(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return ``scale * q.k`` of index queries ``(B, Hkv, T, D)`` and the keys they share, ``(B, Hkv, 1, T, S)``."""
    return grouped_products(q, k, scale).transpose(1, 2)


def best_scores(products: Tensor, positions: Positions, config: NSAConfig) -> Tensor:
    """Return the largest product of a visible key of each block, ``(B, Hkv, T, M)``; ``-inf`` where none is."""
    return by_blocks(products, positions, config).amax(-1)[:, :, 0]


def differentiate_best(products: Tensor, slope: Tensor, positions: Positions, config: NSAConfig) -> Tensor:
    """Return the derivatives in the products, given those in the scores of blocks ``(B, Hkv, T, M)``.

    The best key of a block has all of the block's.
    """
    of_blocks = by_blocks(products, positions, config)
    best = of_blocks.argmax(-1, keepdim=True)
    in_blocks = torch.zeros_like(of_blocks).scatter_(-1, best, slope[:, :, None, ..., None]).flatten(-2)
    columns = columns_of_tokens(products.shape[-1], positions, config).to(torch.int64)
    index = columns[:, None, None].expand_as(in_blocks)
    return F.pad(torch.zeros_like(products), (0, 1)).scatter_add_(-1, index, in_blocks)[..., :-1]
