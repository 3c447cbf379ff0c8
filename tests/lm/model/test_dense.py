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


def test_tokens_that_are_appended_are_those_that_a_layer_stores() -> None:
    layer = DenseAttention(16, 2, 1, 8).eval()
    with torch.no_grad():
        whole = layer.new_cache(2, 9)
        layer(torch.randn(2, 5, 16), cache=whole, lengths=torch.tensor([5, 3]))
        appended = layer.new_cache(2, 9)
        appended.append(whole.k[:, :, :5], whole.v[:, :, :5], torch.tensor([5, 3]))
    assert torch.equal(appended.lengths, whole.lengths)
    for row, length in enumerate((5, 3)):
        assert torch.equal(appended.k[row, :, :length], whole.k[row, :, :length])
        assert torch.equal(appended.v[row, :, :length], whole.v[row, :, :length])
