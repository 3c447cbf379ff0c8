"""Dense attention from new tokens to all that a cache holds, the heads of a group in rows: each key is read once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Attend from queries to the keys up to their own.

    One query a row, in half precision on CUDA, goes through flash attention, split over the keys, which stops where
    the row does. All others go through SDPA with a mask, over all slots: flash attention takes none.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``, the key of token ``p`` in slot ``p``; the slots of the future hold anything finite.
        v: ``(B, Hkv, S, Dv)``.
        position: int ``(B, T)``, where the queries stand.

    Returns:
        ``(B, Hq, T, Dv)``.
    """
    if q.is_cuda and q.dtype in HALF and q.shape[2] == 1 and q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0:
        return _flash_of_one(q, k, v, position)
    groups = q.shape[1] // k.shape[1]
    visible = torch.arange(k.shape[2], device=k.device) <= position[..., None]  # (B, T, S)
    rows = q.unflatten(1, (k.shape[1], groups)).flatten(2, 3)  # (B, Hkv, G * T, Dk)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible.repeat(1, groups, 1)[:, None])
    return out.unflatten(2, (groups, -1)).flatten(1, 2)


def _flash_of_one(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Take every key head of every row for a sequence, of which the first ``position + 1`` slots are used."""
    batch, heads, slots, dim = k.shape
    sequences = torch.arange(batch * heads + 1, dtype=torch.int32, device=q.device)
    used = (position.to(torch.int32) + 1).expand(batch, heads).flatten()
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
