"""``sdpa`` where the keys are a cache: few queries, each row one sequence from token 0, no backward.

What pays for a thousand queries costs more than it saves for one: chunks, copies in float32, masks for every key. Here
the keys that some query sees are one slice of the cache, read as they lie, and a mask is made only if the queries do
not all see the same ones. Where that slice ends is read from the device, without which a CPU would read all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention import sdpa
from flexnsa.attention.sdpa import GATHERED_QUERIES, selected_attention
from flexnsa.config import NSAConfig
from flexnsa.geometry import blocks_within, overlap_band
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.positions import Positions
from flexnsa.masks.sliding_window import window_intervals
from flexnsa.operators import opaque_operator
from flexnsa.selection import top_blocks

__all__ = ["compressed_attention", "select_blocks", "selected_attention", "sliding_window_attention"]


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, positions: Positions, *, config: NSAConfig, **options: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`flexnsa.attention.sdpa.compressed_attention`."""
    if not _are_few(q, options):
        return sdpa.compressed_attention(q, k_cmp, v_cmp, positions, config=config, **options)
    visible = compressed_intervals(positions, config)
    return _attend(q, k_cmp, v_cmp, visible.lo, visible.hi, options["scale"])


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, *, config: NSAConfig, **options: Any
) -> tuple[Tensor, Tensor]:
    """As :func:`flexnsa.attention.sdpa.sliding_window_attention`."""
    if not _are_few(q, options):
        return sdpa.sliding_window_attention(q, k, v, positions, config=config, **options)
    visible = window_intervals(positions, config)
    return _attend(q, k, v, visible.lo, visible.hi, options["scale"])


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, positions: Positions, *, config: NSAConfig, **options: Any
) -> Tensor:
    """As :func:`flexnsa.attention.sdpa.select_blocks`."""
    if lse is None or not _are_few(q, options):
        return sdpa.select_blocks(q, k_cmp, lse, positions, config=config, **options)
    return _select(q, k_cmp, lse, positions.token, astuple(config), options["scale"])


def _are_few(q: Tensor, options: dict[str, Any]) -> bool:
    return q.shape[2] <= GATHERED_QUERIES and options.get("score_mod") is None


@opaque_operator("attend_to_interval")
def _attend(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the keys ``[lo, hi)`` of each query; see :func:`flexnsa.attention.chunked.interval_attention`."""
    scores, keys = _scores(q, k, lo, hi, scale)
    top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    probs = scores.sub_(top).exp_()
    total = probs.sum(-1, keepdim=True)
    out = (probs @ v[:, :, keys].to(probs.dtype)).div_(total.clamp_min(torch.finfo(probs.dtype).tiny))
    lse = top.add_(total.log_())  # a query without a key: log(0)
    return out.to(q.dtype).view(*q.shape[:3], -1), lse.view(q.shape[:3])


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@opaque_operator("select_for_few")
def _select(q: Tensor, k_cmp: Tensor, lse: Tensor, token: Tensor, sizes: Sequence[int], scale: float) -> Tensor:
    """Choose the blocks of queries in sequences from token 0; see :func:`flexnsa.selection.select_in_chunks`."""
    config = NSAConfig(**{field.name: size for field, size in zip(fields(NSAConfig), sizes, strict=True)})
    zero = torch.zeros_like(token)
    positions = Positions(token, zero, zero)
    visible = compressed_intervals(positions, config)
    scores, _ = _scores(q.float(), k_cmp, visible.lo, visible.hi, scale)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has probabilities 0, not NaN
    probs = scores.sub_(lse.view(*scores.shape[:3], 1)).exp_().unflatten(2, (-1, q.shape[2])).sum(2)
    return top_blocks(_block_scores(probs, config), positions, config=config)


@_select.register_fake
def _(q: Tensor, k_cmp: Tensor, lse: Tensor, token: Tensor, sizes: Sequence[int], scale: float) -> Tensor:  # noqa: ARG001
    return token.new_empty(q.shape[0], k_cmp.shape[1], q.shape[2], sizes[3])


def _scores(q: Tensor, k: Tensor, lo: Tensor, hi: Tensor, scale: float) -> tuple[Tensor, slice]:
    """Score the keys that some query sees, ``-inf`` where another does not: fp32 ``(B, Hkv, G * T, K)``."""
    first = int(lo.min())
    keys = slice(first, max(int(hi.max()), first + 1))
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).mul(scale).reshape(*k.shape[:2], -1, q.shape[3])
    scores = rows @ k[:, :, keys].to(dtype).mT
    if ((lo != first) | (hi != keys.stop)).any():
        key = torch.arange(first, keys.stop, dtype=lo.dtype, device=lo.device)
        hidden = (key < lo[..., None]) | (key >= hi[..., None])
        scores.unflatten(2, (-1, q.shape[2])).masked_fill_(hidden[:, None, None], -torch.inf)
    return scores, keys


def _block_scores(probs: Tensor, config: NSAConfig) -> Tensor:
    """As :func:`flexnsa.scoring.block_scores`, for sequences from token 0: their bands lie at fixed places."""
    first, weights = overlap_band(config)
    step = config.select_block_size // config.compress_stride
    width = (blocks_within(probs.shape[-1], config) - 1) * step + len(weights)
    banded = F.pad(probs, (-first, width + first - probs.shape[-1]))
    return banded.unfold(-1, len(weights), step) @ probs.new_tensor(weights)
