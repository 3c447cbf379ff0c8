"""The selected branch as the drop-in computes it, in loops over heads and queries, with autograd and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa import NSAConfig


def attend_in_loops(
    q: Tensor, k: Tensor, v: Tensor, sizes: NSAConfig, *, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend from ``q (B, Hq, S, D)`` to the keys of the selected blocks, ``(B, S, Hq, D)``."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        for key_head in range(k.shape[1]):
            heads = range(key_head * group, (key_head + 1) * group)
            keys, values = k[b, key_head], v[b, key_head]
            for t in range(q.shape[2]):
                seen = _selected_tokens(q[b, heads.start : heads.stop, t].detach(), keys.detach(), t, sizes, scale, cap)
                for head in heads:
                    scores = _capped(scale * (keys[seen] @ q[b, head, t]), cap)
                    terms = scores if sinks is None else torch.cat((scores, sinks[head : head + 1]))
                    out[b, head, t] = torch.softmax(terms, 0)[: len(scores)] @ values[seen]
    return out.transpose(1, 2)


def _selected_tokens(q: Tensor, keys: Tensor, t: int, sizes: NSAConfig, scale: float, cap: float | None) -> list[int]:
    """Return the tokens up to ``t`` of the blocks that the heads ``q (G, D)`` of a group select."""
    length, stride, block = sizes.compress_block_size, sizes.compress_stride, sizes.select_block_size
    starts = range(0, t - length + 2, stride)
    scores = [0.0] * (t // block + 1)
    for head in q:
        if starts:
            means = torch.stack([keys[start : start + length].mean(0) for start in starts])
            shares = torch.softmax(_capped(scale * (means @ head), cap), 0).tolist()
            for start, share in zip(starts, shares, strict=True):
                for token in range(start, start + length):
                    if token // block < len(scores):
                        scores[token // block] += share / stride
    last = len(scores) - sizes.num_local_blocks
    forced = {j for j in range(len(scores)) if j < sizes.num_init_blocks or j >= last}
    others = sorted({*range(len(scores))} - forced, key=lambda j: (-scores[j], j))
    chosen = forced | {*others[: sizes.num_selected_blocks - len(forced)]}
    return [token for token in range(t + 1) if token // block in chosen]


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else cap * torch.tanh(scores / cap)
