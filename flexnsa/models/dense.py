"""The dense twin: causal attention with the same heads and RoPE, to compare NSA with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.rope import rotate


class DenseCache:
    """Keys and values of all tokens of ``B`` rows, each of a length of its own; one spare slot takes padding."""

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_seq_len = max_seq_len
        self.k, self.v = (
            torch.zeros(batch_size, num_kv_heads, max_seq_len + 1, dim, dtype=dtype, device=device)
            for dim in (head_dim, v_head_dim)
        )
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        """Add the first ``lengths (B,)`` of ``T`` tokens; give which keys each new query sees, ``(B, 1, T, S)``.

        Raises:
            ValueError: there is no room for them.
        """
        place = self.lengths[:, None] + torch.arange(k.shape[2], device=k.device)
        end = self.lengths + (k.shape[2] if lengths is None else lengths)
        if not torch.compiler.is_compiling() and int(end.max()) > self.max_seq_len:
            raise ValueError(f"x: expected to fit a cache of {self.max_seq_len} tokens, got {int(end.max())}")
        slot = torch.where(place < end[:, None], place, self.max_seq_len)
        rows = torch.arange(len(slot), device=k.device)[:, None]
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[rows, :, slot] = new.transpose(1, 2)
        self.lengths.copy_(end)
        return (torch.arange(self.max_seq_len, device=k.device) <= place[..., None])[:, None]


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
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.w_q = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.w_k = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.w_v = nn.Linear(dim, num_kv_heads * v_head_dim, bias=False)
        self.w_o = nn.Linear(num_heads * v_head_dim, dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as after construction; also after ``to_empty`` from the meta device."""
        for linear in (self.w_q, self.w_k, self.w_v, self.w_o):
            linear.reset_parameters()

    def new_cache(self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype | None = None) -> DenseCache:
        """Make an empty cache for this layer, by default in the dtype of its weights."""
        weight = self.w_q.weight
        heads = (self.num_kv_heads, self.head_dim, self.v_head_dim)
        return DenseCache(batch_size, max_seq_len, *heads, dtype=dtype or weight.dtype, device=weight.device)

    def forward(self, x: Tensor, *, cache: DenseCache | None = None, lengths: Tensor | None = None) -> Tensor:
        """Attend from every token to itself and all before it; arguments as :class:`flexnsa.NativeSparseAttention`."""
        positions = torch.arange(x.shape[1], device=x.device)
        if cache is not None:
            positions = cache.lengths[:, None] + positions
        q_BHSD = rotate(_split_heads(self.w_q(x), self.num_heads), positions, self.rope_base)
        k_BHSD = rotate(_split_heads(self.w_k(x), self.num_kv_heads), positions, self.rope_base)
        v_BHSD = _split_heads(self.w_v(x), self.num_kv_heads)
        if cache is None:
            out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True, enable_gqa=True)
        else:
            visible = cache.append(k_BHSD, v_BHSD, lengths)
            k_BHSD, v_BHSD = cache.k[:, :, :-1], cache.v[:, :, :-1]
            out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=visible, enable_gqa=True)
        return self.w_o(out_BHSD.transpose(1, 2).flatten(2))


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
