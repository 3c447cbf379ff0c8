"""Plain attention by the kernels that torch brings along: cuDNN's on CUDA, its own flash attention on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa.attention.seam import Attended
from flexnsa.custom_ops import opaque_operator

LARGEST_DIM = 128
"""Of heads in cuDNN's backward."""


def shared_keys_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Attended:
    """Attend from several rows of queries to the same keys.

    Args:
        q: ``(B * c, Hq, T, D)``, ``c`` rows after each other for each row of keys; bfloat16, float16, on a CPU float32.
        k: ``(B, Hkv, N, D)``; ``Hkv`` divides ``Hq``.
        v: ``(B, Hkv, N, D)``.
        scale: factor on the scores.
        causal: query ``i`` sees the keys up to ``i``; ``N`` is then ``T``.

    Returns:
        The output, laid out as q is, and the log-sum-exp, float32; both are differentiable.
    """
    return Attended(*_attention(q, k, v, scale, causal))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return _call_forward(q, _spread(k, q), _spread(v, q), scale, causal)


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _spread(k, q), _spread(v, q)
    grad_q, grad_k, grad_v = _call_backward(grad_out, q, keys, values, out, lse, scale, causal)
    grad_k, grad_v = _sum_shared(grad_k, k), _sum_shared(grad_v, v)
    if grad_lse is not None:
        # The derivative of a log-sum-exp are probabilities: dq = scale dlse sum_j P_ij k_j and dk so.
        # The one is what attention to k in place of v gives, the other what it hands back to v.
        mean_key, _ = _call_forward(q, keys, keys, scale, causal)
        weight = (scale * grad_lse)[..., None]
        _, _, from_lse = _call_backward((weight * q).to(q.dtype), q, keys, keys, mean_key, lse, scale, causal)
        grad_q = grad_q + (weight * mean_key).to(q.dtype)
        grad_k = grad_k + _sum_shared(from_lse, k)
    return grad_q, grad_k, grad_v


def _call_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1)


def _call_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad_out, q, k, v, out, lse, 0.0, causal, scale=scale)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed and offset of dropout
    lengths = (None, None, q.shape[2], k.shape[2])
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, lse[..., None], unused, unused, None, *lengths, 0.0, causal, scale=scale
    )


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """Give each query head keys ``(B, Hkv, N, D)`` of its own, and show them to all rows of queries."""
    rows, groups = q.shape[0] // x.shape[0], q.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, 1)[:, None].expand(-1, rows, -1, -1, -1).flatten(0, 1)


def _sum_shared(grad: Tensor, x: Tensor) -> Tensor:
    """Undo :func:`_spread` of a gradient."""
    shared = grad.unflatten(0, (x.shape[0], -1)).unflatten(2, (x.shape[1], -1))
    return shared.sum((1, 3), dtype=torch.float32).to(x.dtype)


# Kernels of torch tell a compiler themselves how they lay their results out, so these functions can be run on fakes.
_attention = opaque_operator("shared_keys_attention")(_attend)
_attention.register_fake(_attend)
_attention_backward = opaque_operator("shared_keys_attention_backward")(_gradients)
_attention_backward.register_fake(_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None and grad_lse is None:
        return (None,) * 5
    q, k, v, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = _attention_backward(grad_out, grad_lse, q, k, v, out, lse, ctx.scale, ctx.causal)
    return (*grads, None, None)


_attention.register_autograd(_backward, setup_context=_save)
