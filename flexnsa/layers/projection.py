"""Several linear maps of one input, on a GPU as one product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.attention.triton.few_rows import multiply_few_rows
from flexnsa.validation import FLOATING

ROW_MULTIPLE = 64
"""Numbers in a row of the product are a multiple of this, so that kernels may read parts of it in whole cache lines."""


def project(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """Apply each of some maps ``(..., dim)`` to ``(..., out_features)``; one that is there twice, once.

    On a GPU one product reads x once, and its gradient once instead of adding up those of many. The rows of its parts
    lie further apart than they are long. A CPU gains nothing by it, and a map that is more than a product (of a
    subclass, with a bias, with hooks or with a forward or a weight of another kind) has to be called.
    """
    each = _once(linears)
    if x.is_cuda and all(map(is_plain, each)):
        rows = project_together(x, [linear.weight for linear in each])
    else:
        rows = [linear(x) for linear in each]
    return [rows[each.index(linear)] for linear in linears]


def project_few(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """As :func:`project` of plain maps of one dtype, for a few rows: a kernel reads the weights where they lie.

    It has no gradient.
    """
    each = _once(linears)
    product = multiply_few_rows(torch.flatten(x, 0, -2).contiguous(), [linear.weight for linear in each])
    rows = torch.split(torch.unflatten(product, 0, x.shape[:-1]), [linear.out_features for linear in each], dim=-1)
    return [rows[each.index(linear)] for linear in linears]


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
    if type(linear) is not nn.Linear or linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        return False
    return is_dense(linear.weight) and has_no_hooks(linear)


def is_dense(weight: Tensor) -> bool:
    """Tell whether a kernel can read a weight: it is of no class that reads its numbers in a way of its own."""
    return type(weight) in (Tensor, nn.Parameter)


def weight_of(layer: nn.Module) -> Tensor:
    """Give a tensor of the dtype and device that a layer computes with: its first floating parameter, or else buffer.

    No map is asked for its ``weight``, because any module can take its place; and numbers of 8 bits are only stored.

    Raises:
        ValueError: the layer has neither.
    """
    for tensor in chain(layer.parameters(), layer.buffers()):
        if tensor.dtype in FLOATING:
            return tensor
    raise ValueError(f"layer: expected a floating parameter or buffer, got none in {type(layer).__name__}")


def has_no_hooks(module: nn.Module) -> bool:
    """Tell whether calling the module is calling the ``forward`` of its class, and nothing else."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(module) and not any(getattr(module, name) for name in hooks)


def _once(linears: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Name each map once, in order: branches may share one."""
    return [linear for i, linear in enumerate(linears) if linear not in linears[:i]]
