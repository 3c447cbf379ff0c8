"""The dense baseline equals the explicit softmax."""

import torch
from torch import Tensor

from flexnsa.lm import DenseAttention
from tests.support.dense import causal, dense_attention


def test_dense_attention_is_the_explicit_softmax():
    attention = DenseAttention(16, 4, 2, 6, v_head_dim=4).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, k = (_turned(linear(x).unflatten(-1, (-1, 6))).transpose(1, 2) for linear in (attention.w_q, attention.w_k))
    v = attention.w_v(x).unflatten(-1, (-1, 4)).transpose(1, 2)
    out, _ = dense_attention(q, k, v, causal(9))
    torch.testing.assert_close(attention(x), attention.w_o(out.transpose(1, 2).flatten(2)))


def _turned(x_BSHD: Tensor) -> Tensor:
    """RoPE as complex numbers."""
    half = x_BSHD.shape[-1] // 2
    angle = torch.arange(x_BSHD.shape[1])[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x_BSHD[..., :half], x_BSHD[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)
