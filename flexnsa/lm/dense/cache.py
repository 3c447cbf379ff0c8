"""The cache of dense attention, keys and values of all earlier tokens, and a step of new ones that attend to them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.cache.step_cache import StepCache
from flexnsa.cache.steps import BufferSizes
from flexnsa.config import NSAConfig
from flexnsa.layers.rope import apply_rope, rope_tables

HALF = (torch.bfloat16, torch.float16)
FLASH_DIMS = range(8, 257, 8)
"""Head dimensions that flash attention takes as they are."""


class DenseCache(StepCache):
    """Keys and values of all tokens of ``B`` sequences, each of its own length; one spare slot takes padding."""

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        *,
        rope_base: float = 10_000.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        full = BufferSizes(max_seq_len=max_seq_len, max_rewind=1, config=NSAConfig())
        heads = num_kv_heads, head_dim, v_head_dim
        super().__init__(full, batch_size, *heads, ("k", "v"), rope_base=rope_base, dtype=dtype, device=device)

    @property
    def k(self) -> Tensor:
        """Keys ``(B, Hkv, max_seq_len + 1, Dk)``."""
        return self.buffers["k"]

    @property
    def v(self) -> Tensor:
        """Values ``(B, Hkv, max_seq_len + 1, Dv)``."""
        return self.buffers["v"]

    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
        """Add the first ``lengths (B,)`` of ``T`` tokens: ``k (B, Hkv, T, Dk)``, already rotated, and ``v``.

        Raises:
            ValueError: there is no capacity for them. A compiled or captured call cannot raise, and keeps none of them.
        """
        step = self.begin(k.shape[2], lengths)
        self.store("k", k, step)
        self.store("v", v, step)
        self.end(step)


def place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cached_k: Tensor,
    cached_v: Tensor,
    before: Tensor,
    lengths: Tensor | None,
    rope_base: float,
) -> tuple[Tensor, Tensor]:
    """Rotate the query and the key of one token of each sequence, and store its key and value.

    Args:
        q: ``(B, Hq, 1, Dk)``.
        k: ``(B, Hkv, 1, Dk)``.
        v: ``(B, Hkv, 1, Dv)``.
        cached_k: ``(B, Hkv, S + 1, Dk)``; the last slot takes what must not be kept.
        cached_v: ``(B, Hkv, S + 1, Dv)``.
        before: int32 ``(B,)``, the lengths of the sequences, which are then those with the new token.
        lengths: int ``(B,)``, 0 for padding; by default 1.
        rope_base: of the rotary angles.

    Returns:
        The queries, NaN where there was no capacity; and their positions, int ``(B, 1)``.
    """
    capacity, position = cached_k.shape[2] - 1, before[:, None].clone()
    end = before + (1 if lengths is None else lengths.to(before.dtype))
    after = end.clamp_max(capacity)
    tables = rope_tables(position, q.shape[3], rope_base, dtype=torch.promote_types(q.dtype, torch.float32))
    slot = torch.where(position < after[:, None], position, capacity).long()
    rows = torch.arange(len(slot), device=k.device)[:, None]
    cached_k[rows, :, slot] = apply_rope(k, tables).transpose(1, 2)
    cached_v[rows, :, slot] = v.transpose(1, 2)
    before.copy_(after)
    lost = (position >= after[:, None]) & (position < end[:, None])
    return apply_rope(q, tables).masked_fill(lost[:, None, :, None], torch.nan), position


def attend_cached(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Attend from queries to the keys up to their own.

    One query a row, in half precision on CUDA, goes through flash attention, split over the keys, which stops where
    the row does. All others go through SDPA with a mask, over all slots: flash attention takes none.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``, the key of token ``p`` in slot ``p``; the slots of the future hold anything finite.
        v: ``(B, Hkv, S, Dv)``.
        position: int ``(B, T)``, of the queries.

    Returns:
        ``(B, Hq, T, Dv)``.
    """
    if q.is_cuda and q.dtype in HALF and q.shape[2] == 1 and q.shape[3] == v.shape[3] and q.shape[3] in FLASH_DIMS:
        return _flash_of_one(q, k, v, position)
    visible = (torch.arange(k.shape[2], device=k.device) <= position[..., None])[:, None]  # (B, 1, T, S)
    if q.shape[2] > 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # heads of a group share keys, and the mask of one query
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).flatten(1, 2)[:, :, None]


def _flash_of_one(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Take every key head of every row for a sequence, of which the first ``position + 1`` slots are used."""
    batch, heads, slots, dim = k.shape
    sequences = torch.arange(batch * heads + 1, dtype=torch.int32, device=q.device)
    used = (position.to(torch.int32) + 1).expand(batch, heads).flatten().contiguous()  # of one row, it is a view
    # SDPA and varlen_attn of PyTorch 2.11 cannot say how many keys are used, unless the host knows.
    out, *_ = torch.ops.aten._flash_attention_forward(
        q.reshape(batch * heads, -1, dim),
        k.reshape(-1, 1, dim),
        v.reshape(-1, 1, dim),
        sequences,
        sequences * slots,
        1,
        slots,
        0.0,
        False,
        False,
        scale=dim**-0.5,
        seqused_k=used,
    )
    return out.reshape(q.shape)
