"""Several linear maps of one input, on a GPU as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROW_MULTIPLE = 64
"""Numbers in a row of the product are a multiple of this, so that kernels may read parts of it in whole cache lines."""


def project(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Apply each of some maps ``(..., dim)`` to ``(..., out_features)``.

    On a GPU one product reads x once, and its gradient once instead of adding up those of many. The rows of its parts
    lie further apart than they are long. A CPU gains nothing by it, and a map that is more than a product (of a
    subclass, with a bias, with hooks or with a forward or a weight of another kind) has to be called.
    """
    if x.is_cuda and all(map(is_plain, linears)):
        return project_together(x, [linear.weight for linear in linears])
    return [linear(x) for linear in linears]


def project_together(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Multiply by all weights ``(out_features, dim)`` at once."""
    sizes = [len(weight) for weight in weights]
    padding = weights[0].new_zeros(-sum(sizes) % ROW_MULTIPLE, weights[0].shape[1])
    product = F.linear(x, torch.cat([*weights, padding]))
    return list(torch.split(product, [*sizes, len(padding)], dim=-1))[: len(sizes)]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split ``(B, S, num_heads * D)`` into ``(B, num_heads, S, D)``."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def is_plain(linear: nn.Linear) -> bool:
    """Tell whether calling the map is a product with its weight, and nothing else."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if type(linear) is not nn.Linear or linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        return False
    if "forward" in vars(linear) or type(linear.weight) not in (Tensor, nn.Parameter):
        return False
    return not any(getattr(linear, name) for name in hooks)
