"""Plain causal attention by the kernels that torch brings along: cuDNN's on CUDA, its own flash attention on a CPU.

The rows of queries may be more than those of keys, ``c`` after each other for each: they then share them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Give the output and the log-sum-exp; query ``i`` sees the keys up to ``i``.

    Args:
        q: ``(B * c, Hq, T, D)``; bfloat16 or float16, on a CPU float32 too.
        k: ``(B, Hkv, T, D)``; ``Hkv`` divides ``Hq``.
        v: ``(B, Hkv, T, D)``.
        scale: factor on the scores.
    """
    return _attend(q, _spread(k, q), _spread(v, q), scale)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of q, k and v from those of the output and the log-sum-exp."""
    keys, values = _spread(k, q), _spread(v, q)
    grad_q, grad_k, grad_v = _differentiate(grad_out, q, keys, values, out, lse, scale)
    grad_k, grad_v = _sum_shared(grad_k, k), _sum_shared(grad_v, v)
    if grad_lse is not None:
        # The derivative of a log-sum-exp are probabilities: dq = scale dlse sum_j P_ij k_j and dk so.
        # The one is what attention to k in place of v gives, the other what attention hands back to any v.
        mean_key, _ = _attend(q, keys, keys, scale)
        weight = (scale * grad_lse)[..., None]
        _, _, from_lse = _differentiate((weight * q).to(q.dtype), q, keys, values, out, lse, scale)
        grad_q = grad_q + (weight * mean_key).to(q.dtype)
        grad_k = grad_k + _sum_shared(from_lse, k)
    return grad_q, grad_k, grad_v


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        return out, lse
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    return out, lse.squeeze(-1)


def _differentiate(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad_out, q, k, v, out, lse, 0.0, True, scale=scale)
    q, out, grad_out = _laid_out_alike(q, out, grad_out)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed and offset of dropout
    lengths = (None, None, q.shape[2], k.shape[2])
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse[..., None], unused, unused, None, *lengths, 0.0, True, scale=scale
    )


def _laid_out_alike(q: Tensor, out: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give all three the same strides: torch keeps cuDNN's plan for those of q, and reads the others by it unasked."""
    if grad_out.stride() != q.stride():
        grad_out = torch.empty_like(q).copy_(grad_out)
    if q.stride() == out.stride() == grad_out.stride():
        return q, out, grad_out
    return q.contiguous(), out.contiguous(), grad_out.contiguous()


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Give each query head keys ``(B, Hkv, N, D)`` of its own, and show them to all rows of queries."""
    rows, groups = q.shape[0] // x.shape[0], q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1)[:, None].expand(-1, rows, -1, -1, -1).flatten(0, 1)


def _sum_shared(grad: Tensor, x: Tensor) -> Tensor:
    """Undo :func:`_spread` of a gradient."""
    shared = torch.unflatten(torch.unflatten(grad, 0, (x.shape[0], -1)), 2, (x.shape[1], -1))
    return shared.sum((1, 3), dtype=torch.float32)
