"""What opaque operators of attention share: where their results lie."""

from __future__ import annotations

import torch
from torch import Tensor


def outputs(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Make room for out, in the memory order of q, and for lse."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, length, dim)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


def with_rows(x: Tensor) -> Tensor:
    """Kernels take any strides but of the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
