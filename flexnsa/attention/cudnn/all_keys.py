"""Attention of fewer queries than a run has, which all see all keys: products of their few rows, in float32.

cuDNN would take them too, but its backward of a single query is not to be relied on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Give the output and the log-sum-exp, float32, of ``q (B, Hq, T, D)`` over ``k, v (B, Hkv, N, D)``."""
    scores = _rows(q, k) @ k.float().mT * scale
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ v.float()
    return _heads(out, q), _heads(lse, q).squeeze(-1)


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
    """Give the gradients of q, k and v, float32, from those of the output and the log-sum-exp."""
    rows, grad_rows, keys = _rows(q, k), _rows(grad_out, k), k.float()
    probabilities = (rows @ keys.mT * scale - _rows(lse[..., None], k)).exp()
    delta = (grad_rows * _rows(out, k)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - _rows(grad_lse[..., None], k)
    grad_scores = probabilities * (grad_rows @ v.float().mT - delta) * scale
    return _heads(grad_scores @ keys, q), grad_scores.mT @ rows, probabilities.mT @ grad_rows


def _rows(x: Tensor, k: Tensor) -> Tensor:
    """Lay the heads that share keys below each other, ``(B, Hkv, Hq / Hkv * T, D)``, in float32."""
    return torch.unflatten(x.float(), 1, (k.shape[1], -1)).flatten(2, 3)


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Undo :func:`_rows`."""
    return torch.unflatten(x, 2, (-1, q.shape[2])).flatten(1, 2)
