"""Attention to selected blocks, query by query: the keys of its blocks are gathered for each query.

That copies ``n * l'`` keys for each query: more than :mod:`flexnsa.attention.sdpa.selected` copies for many queries,
but less than a loop over blocks costs for a few, as in decoding. No other keys are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SelectedInputs(NamedTuple):
    """Queries ``(B, Hq, T, Dk)``, keys and values ``(B, Hkv, S, D)``, and the blocks that each query selected.

    ``block_indices`` is int32 ``(B, Hkv, T, n)``, ascending, padded with -1; a block has ``block_size`` keys. The
    positions are int ``(B or 1, T)``: ``token``, the query's own among the keys, never decreases along ``T``, and
    ``start`` is the first key of its block 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    block_indices: Tensor
    token: Tensor
    start: Tensor
    scale: float
    block_size: int


def gathered_attention(inputs: SelectedInputs) -> tuple[Tensor, Tensor]:
    """As :func:`flexnsa.attention.sdpa.selected.selected_attention`."""
    q, k, v, block_indices, token, start, scale, block_size = inputs
    key, visible = selected_keys(block_indices, token, start, block_size)
    q_BKTGD = torch.unflatten(q, 1, (k.shape[1], -1)).transpose(2, 3)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _attend(q_BKTGD, *gather_keys(k, v, key, visible), visible[..., None, :], scale)
    return out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2)


def gather_keys(k: Tensor, v: Tensor, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of each query, ``key (B, Hkv, T, K)``; where one is not visible, the head's first."""
    head = torch.arange(k.shape[0] * k.shape[1], device=k.device).view(*k.shape[:2], 1, 1)
    row = torch.where(visible, key, 0) + head * k.shape[2]
    # An embedding copies whole rows of D elements.
    return F.embedding(row, k.reshape(-1, k.shape[-1])), F.embedding(row, v.reshape(-1, v.shape[-1]))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from the rows of each matrix of ``q`` to the ``visible`` rows of ``k``."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = ((q.to(dtype) * scale) @ k.to(dtype).mT).masked_fill(~visible, -torch.inf)
    # A row that sees nothing: subtracting a finite maximum from -inf leaves probabilities 0, not NaN.
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    probs = (scores - top).exp()
    total = probs.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    lse = torch.where(visible.any(-1, keepdim=True), top + total.log(), -torch.inf)
    return ((probs / total) @ v.to(dtype)).to(q.dtype), lse.squeeze(-1)


def selected_keys(block_indices: Tensor, token: Tensor, start: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """List the keys of the selected blocks and which of them the query sees, each ``(B, Hkv, T, n * l')``."""
    first = block_indices * block_size + start[:, None, :, None]
    key = first[..., None] + torch.arange(block_size, dtype=first.dtype, device=first.device)
    visible = (block_indices >= 0)[..., None] & (key <= token[:, None, :, None, None])
    return key.flatten(-2).long(), visible.flatten(-2)
