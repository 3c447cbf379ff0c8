"""The dense oracle: softmax attention with an explicit boolean mask, and which keys each branch shows.

Quick where :mod:`tests.support.literal` is slow, and as independent of the package as that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexnsa.config import NSAConfig, num_compressed


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that ``visible``, bool ``(T, K)`` or ``(B, Hkv, T, K)``, shows; ``(out, lse)``.

    A query without a key has output 0 and lse ``-inf``; neither makes a gradient NaN.
    """
    group = q.shape[1] // k.shape[1]
    k, v, visible = (x.repeat_interleave(group, 1) if x.dim() == 4 else x for x in (k, v, visible))
    empty = ~visible.any(-1, keepdim=True)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return scores.softmax(-1).masked_fill(~visible, 0.0) @ v, lse


def causal(length: int) -> Tensor:
    """Each query sees itself and all before it."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def visible_keys(branch: str, lengths: Sequence[int], config: NSAConfig, block_indices: Tensor | None = None) -> Tensor:
    """Which keys of a row of documents each query sees: in each document those that it would see alone.

    Bool ``(T, K)``; of the selected branch, given ``block_indices (B, Hkv, T, n)``, ``(B, Hkv, T, K)``.
    """
    total = sum(lengths)
    shape = () if block_indices is None else block_indices.shape[:2]
    visible = torch.zeros(*shape, total, num_compressed(total, config) if branch == "cmp" else total, dtype=torch.bool)
    first_token = first_key = 0
    for length in lengths:
        rows = slice(first_token, first_token + length)
        num_keys = num_compressed(length, config) if branch == "cmp" else length
        t, s = torch.arange(length)[:, None], torch.arange(num_keys)
        if branch == "cmp":
            seen = s * config.compress_stride + config.compress_block_size - 1 <= t
        elif branch == "win":
            seen = (s <= t) & (s > t - config.window_size)
        else:
            chosen = block_indices[:, :, rows, :, None] == s // config.select_block_size
            seen = chosen.any(-2) & (s <= t)
        visible[..., rows, first_key : first_key + num_keys] = seen
        first_token, first_key = first_token + length, first_key + num_keys
    return visible
