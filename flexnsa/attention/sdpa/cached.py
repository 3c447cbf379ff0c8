"""``sdpa`` where the keys are a cache: few queries, sequences that start at token 0, no backward.

Chunks, copies in float32 and masks for every key save time for a thousand queries, and cost time for one. Here the keys
that any query sees are one slice of the cache. PyTorch's SDPA reads it in place, with the heads of a group as its
queries, and with a mask only if the queries do not all see the same keys. The end of the slice is read from the device;
otherwise a CPU would read all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.attention.plan import Plan
from flexnsa.attention.scoring import block_scores
from flexnsa.attention.sdpa import branches
from flexnsa.attention.sdpa.selected_few import gather_keys, selected_keys
from flexnsa.attention.selection import top_blocks
from flexnsa.config import NSAConfig, blocks_within
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.window import window_intervals
from flexnsa.operators.opaque import opaque_operator


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """As :func:`flexnsa.attention.sdpa.branches.compressed`; for few queries with importance instead of lse."""
    if not Plan.of(q, k_cmp, has_mod=call.score_mod is not None).are_gathered:
        return branches.compressed(q, k_cmp, v_cmp, call)
    token = positions_of(q, call.positions).token
    out, importance = _attend_and_score(q, k_cmp, v_cmp, token, call.config.to_ints(), call.scale)
    return Compressed(out, None, importance)


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """As :func:`flexnsa.attention.sdpa.branches.window`; for few queries without lse."""
    if not Plan.of(q, k, has_mod=call.score_mod is not None).are_gathered:
        return branches.window(q, k, v, call)
    visible = window_intervals(positions_of(q, call.window_positions), call.config)
    return BranchOutput(_attend_to_interval(q, k, v, visible.lo, visible.hi, call.scale), None)


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """As :func:`flexnsa.attention.sdpa.branches.selected`; for few queries without lse."""
    if not Plan.of(q, k, has_mod=call.score_mod is not None).are_gathered:
        return branches.selected(q, k, v, block_indices, call)
    token, size = positions_of(q, call.positions).token, call.config.select_block_size
    return BranchOutput(_attend_to_blocks(q, k, v, block_indices, token, size, call.scale), None)


def select(q: Tensor, k_cmp: Tensor, call: Call, lse: Tensor | None, importance: Tensor | None) -> Tensor:
    """As :func:`flexnsa.attention.sdpa.branches.select`; for few queries by importance.

    A step's q and k_cmp may differ from those of a whole sequence in the last bit, because a product of one row is
    summed in another order than one of many. In bf16, about 1 query of 100 then selects other blocks, whose scores are
    equal but for that rounding.
    """
    if call.config.index_score is not None or not Plan.of(q, k_cmp, has_mod=call.score_mod is not None).are_gathered:
        return branches.select(q, k_cmp, call, lse, None)
    positions = positions_of(q, call.positions)
    if importance is None:
        _, importance = _attend_and_score(q, k_cmp, None, positions.token, call.config.to_ints(), call.scale)
    return top_blocks(importance, positions, config=call.config)


@opaque_operator("attend_and_score")
def _attend_and_score(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor | None, token: Tensor, sizes: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the compressed tokens that each query sees, and sum the probabilities by blocks (Eq. 8 to 10)."""
    config, zero = NSAConfig.from_ints(sizes), torch.zeros_like(token)
    keys, hidden = _seen(compressed_intervals(Positions(token, zero, zero), config))
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).mul(scale).reshape(*k_cmp.shape[:2], -1, q.shape[3])
    scores = torch.unflatten(rows @ k_cmp[:, :, keys].to(dtype).mT, 2, (-1, q.shape[2]))
    if hidden is not None:
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
    probs = scores.softmax(-1)
    if hidden is not None:
        probs.masked_fill_(hidden[:, None, None], 0)  # the softmax of a query that sees no key is NaN
    num_blocks = blocks_within(k_cmp.shape[2], config)
    importance = scores.new_zeros(*k_cmp.shape[:2], q.shape[2], num_blocks, dtype=torch.float32)
    seen_blocks = blocks_within(probs.shape[-1], config)
    importance[..., :seen_blocks] = block_scores(probs.sum(2), None, num_blocks=seen_blocks, config=config)
    if v_cmp is None:
        return q.new_empty(0), importance
    out = probs.flatten(2, 3).to(v_cmp.dtype) @ v_cmp[:, :, keys]
    return out.to(q.dtype).view(*q.shape[:3], -1), importance


@_attend_and_score.register_fake
def _(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor | None, _token: Tensor, sizes: Sequence[int], _scale: float
) -> tuple[Tensor, Tensor]:
    num_blocks = blocks_within(k_cmp.shape[2], NSAConfig.from_ints(sizes))
    importance = q.new_empty(*k_cmp.shape[:2], q.shape[2], num_blocks, dtype=torch.float32)
    return q.new_empty(0) if v_cmp is None else q.new_empty(*q.shape[:3], v_cmp.shape[3]), importance


@opaque_operator("attend_to_interval")
def _attend_to_interval(q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, scale: float) -> Tensor:
    """Attend to the keys ``[lo, hi)`` of each query, int ``(B, T)``."""
    keys, hidden = _seen(Intervals(lo, hi))
    mask = None if hidden is None else ~hidden.repeat(1, q.shape[1] // k.shape[1], 1)[:, None]
    rows = q.reshape(*k.shape[:2], -1, q.shape[3])
    out = F.scaled_dot_product_attention(rows, k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale)
    return out.view(*q.shape[:3], -1)


@opaque_operator("attend_to_blocks")
def _attend_to_blocks(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, token: Tensor, block_size: int, scale: float
) -> Tensor:
    """Attend to the past tokens of the blocks of each query, gathered for it."""
    key, visible = selected_keys(block_indices, token, torch.zeros_like(token), block_size)
    keys, values = (x.flatten(1, 2) for x in gather_keys(k, v, key, visible))  # (B, Hkv * T, K, D)
    grouped = torch.unflatten(q, 1, (k.shape[1], -1)).transpose(2, 3).flatten(1, 2)
    mask = visible.flatten(1, 2)[:, :, None]
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return torch.unflatten(out, 1, (k.shape[1], -1)).transpose(2, 3).reshape(*q.shape[:3], -1)


@_attend_to_interval.register_fake
@_attend_to_blocks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:  # noqa: ARG001
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _seen(visible: Intervals) -> tuple[slice, Tensor | None]:
    """Return the slice of keys that any query sees, at least one, and the mask ``(B, T, K)`` of hidden ones, if any."""
    lo = cast("list[int]", visible.lo.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    hi = cast("list[int]", visible.hi.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
    first, last = min(lo), max(*hi, min(lo) + 1)
    if max(lo) == first and min(hi) == last:
        return slice(first, last), None
    key = torch.arange(first, last, dtype=visible.lo.dtype, device=visible.lo.device)
    return slice(first, last), visible.hide(key)
