"""Attention with a user's score_mod in plain PyTorch: the scores of a chunk of queries are laid out and handed to it.

A chunk is a checkpoint: its scores are computed again in backward, so that what is saved stays linear in the sequence,
and autograd differentiates the function and whatever it captured. ``torch.func.grad`` knows no checkpoints: there all
scores are saved. Loops depend on data and operators take no functions, so nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from flexnsa.attention.interface import BranchOutput, Call, given
from flexnsa.attention.sdpa.selected_few import gather_keys, selected_keys
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.user_mods import apply_score_mod, query_positions, token_positions
from flexnsa.operators.opaque import in_transform

GATHERED_NUMBERS = 2**24
"""Keys times dimensions that a chunk of the selected branch gathers: 64 MB in fp32."""


def attend_to_intervals(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Intervals,
    positions: Positions,
    key_positions: Callable[[Tensor, Positions], Tensor],
    call: Call,
) -> BranchOutput:
    """Attend to the interval of keys that is ``visible`` to each query.

    Args:
        q: ``(B, Hq, T, Dk)``.
        k: ``(B, Hkv, S, Dk)``.
        v: ``(B, Hkv, S, Dv)``.
        visible: the interval of each query.
        positions: of the queries.
        key_positions: locates keys by number in the document of each query.
        call: with a score_mod.
    """

    def chunk(queries: slice) -> BranchOutput:
        here = positions.at(queries)
        lo, hi = visible.lo[:, None, queries, None], visible.hi[:, None, queries, None]
        first = int(lo.min())
        keys = slice(first, max(first, int(hi.max())))
        key = torch.arange(keys.start, keys.stop, dtype=torch.int32, device=k.device).view(1, 1, 1, -1)
        seen = (lo <= key) & (key < hi)
        arguments = (q[:, :, queries], k[:, :, keys], v[:, :, keys], seen, query_positions(here))
        return _run(_attend, *arguments, key_positions(key, here), call)

    return _in_chunks(chunk, q.shape[2], 256)  # neighbours share their keys


def attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """Attend to the past tokens of the selected blocks, gathered for each query."""
    positions, block_size = positions_of(q, call.positions), call.config.select_block_size

    def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, here: Positions) -> BranchOutput:
        key, seen = selected_keys(chosen, here.token, here.start, block_size)
        keys, kv_idx = gather_keys(k, v, key, seen), token_positions(key, here)
        return _attend(q, *keys, seen, query_positions(here), kv_idx, call)

    def chunk(queries: slice) -> BranchOutput:
        return _run(attend, q[:, :, queries], k, v, block_indices[:, :, queries], positions.at(queries))

    numbers = k.shape[0] * k.shape[1] * block_indices.shape[-1] * block_size * max(k.shape[-1], v.shape[-1])
    return _in_chunks(chunk, q.shape[2], max(1, GATHERED_NUMBERS // numbers))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, query: Tensor, key: Tensor, call: Call) -> BranchOutput:
    """Attend from ``q (B, Hq, C, D)`` to keys ``(B, Hkv, K, D)``, or to each query's own, ``(B, Hkv, C, K, D)``.

    ``visible`` and the positions ``key`` are ``(B or 1, Hkv or 1, C, K)``, the positions ``query`` ``(B or 1, C)``.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = k.shape[1]
    group = q.shape[1] // heads
    keys = "bksd" if k.dim() == 4 else "bkcsd"
    with torch.autocast(q.device.type, enabled=False):
        grouped = torch.unflatten(q.to(dtype) * call.scale, 1, (heads, group))
        scores = torch.einsum(f"bkgcd,{keys}->bkgcs", grouped, k.to(dtype)).flatten(1, 2)
        visible, key = (x if x.shape[1] == 1 else x.repeat_interleave(group, dim=1) for x in (visible, key))
        scores = apply_score_mod(given(call.score_mod), scores, query, key).masked_fill(~visible, -torch.inf)
        # Shifted by a constant near lse, the sum of a row is 1 but for rounding; that of a row that sees nothing is 0,
        # and a shift that is finite keeps it from being NaN.
        shift = scores.detach().logsumexp(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
        probs = (scores - shift).exp()
        total = probs.sum(-1, keepdim=True)
        lse = torch.where(total == 0, -torch.inf, shift + total.clamp_min(0.5).log()).squeeze(-1)
        probs = torch.unflatten(probs / total.clamp_min(0.5), 1, (heads, group))
        out = torch.einsum(f"bkgcs,{keys}->bkgcd", probs, v.to(dtype))
    return BranchOutput(out.flatten(1, 2).to(q.dtype), lse)


def _run(attend: Callable[..., BranchOutput], *arguments: object) -> BranchOutput:
    if not torch.is_grad_enabled() or in_transform():
        return attend(*arguments)
    return cast("BranchOutput", checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False))


def _in_chunks(chunk: Callable[[slice], BranchOutput], length: int, size: int) -> BranchOutput:
    def joined() -> BranchOutput:
        outs, lses = zip(*(chunk(slice(at, at + size)) for at in range(0, length, size)), strict=True)
        return BranchOutput(torch.cat(outs, dim=2), torch.cat(lses, dim=2))

    # Not as a decorator: that would import the compiler with the package.
    reason = "with a mod, impl='sdpa' is not compiled; impl='flex' is"
    run = torch.compiler.disable(joined, reason=reason)  # pyright: ignore[reportUnknownMemberType]
    return cast("Callable[[], BranchOutput]", run)()
