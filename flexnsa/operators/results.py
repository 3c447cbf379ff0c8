"""Empty results of opaque operators, in the memory order of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, *tuple[object, ...]]
"""The named tuple of an operator that begins with q, k and v."""


def empty_outputs(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Allocate out, in the memory order of q, and lse."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):
        out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
    else:
        out = q.new_empty(batch, heads, length, dim)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of q, k and v, each in the memory order of its tensor if rows are contiguous."""
    dq, dk, dv = (torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def fake_gradients(_grad: Tensor, _lse: Tensor | None, inputs: Inputs, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Call :func:`empty_gradients` with the arguments of a backward operator."""
    return empty_gradients(*inputs[:3])


def empty_contiguous_outputs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Allocate out, and lse in fp32 or wider."""
    q, _, v = inputs[:3]
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(
        q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)
    )


def empty_contiguous_gradients(
    _grad: Tensor, _lse: Tensor | None, inputs: Inputs, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of q, k and v."""
    q, k, v = inputs[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def with_rows(x: Tensor) -> Tensor:
    """Make rows contiguous; kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
