"""Empty results of opaque operators, in the memory order of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor


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


def empty_contiguous_outputs(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Allocate out, and lse in fp32 or wider."""
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def empty_contiguous_gradients(
    grad_out: Tensor,  # noqa: ARG001
    grad_lse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def with_rows(x: Tensor) -> Tensor:
    """Make rows contiguous; kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
