"""The dense twin: causal attention with the same heads and RoPE, to compare NSA with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.rope import rotate


class DenseAttention(nn.Module):
    """Grouped-query causal attention, ``(B, S, dim) -> (B, S, dim)``.

    Args:
        dim: width of input and output.
        num_heads: query heads ``Hq``.
        num_kv_heads: key/value heads ``Hkv``; divides ``num_heads``.
        head_dim: ``Dk``.
        v_head_dim: ``Dv``; ``None`` means ``head_dim``.
        rope_base: base of the rotary frequencies.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_heads, self.num_kv_heads, self.rope_base = num_heads, num_kv_heads, rope_base
        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.w_k = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.w_v = nn.Linear(dim, num_kv_heads * v_head_dim, bias=False)
        self.w_o = nn.Linear(num_heads * v_head_dim, dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after construction; also after ``to_empty`` from the meta device."""
        for linear in (self.w_q, self.w_k, self.w_v, self.w_o):
            linear.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Attend from every token to itself and all before it."""
        positions = torch.arange(x.shape[1], device=x.device)
        q_BHSD = rotate(_split_heads(self.w_q(x), self.num_heads), positions, self.rope_base)
        k_BHSD = rotate(_split_heads(self.w_k(x), self.num_kv_heads), positions, self.rope_base)
        v_BHSD = _split_heads(self.w_v(x), self.num_kv_heads)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True, enable_gqa=True)
        return self.w_o(out_BHSD.transpose(1, 2).flatten(2))


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
