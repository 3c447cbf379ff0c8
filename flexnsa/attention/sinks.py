"""Attention sinks: for each head a score that takes its share of the probability and has no value."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Call, Compressed, Implementation, no_gated_sum


def with_sinks(implementation: Implementation, sinks: Tensor | None) -> Implementation:
    """Return an implementation whose branches have a sink ``sinks (Hq,)`` in the softmax of each head.

    Blocks are scored without it.
    """
    if sinks is None:
        return implementation

    def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
        attended = implementation.compressed(q, k_cmp, v_cmp, call)
        return attended._replace(out=_share(attended, sinks))

    def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
        attended = implementation.selected(q, k, v, block_indices, call)
        return attended._replace(out=_share(attended, sinks))

    def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
        attended = implementation.window(q, k, v, call)
        return attended._replace(out=_share(attended, sinks))

    branches = {"compressed": compressed, "selected": selected, "window": window}
    return replace(implementation, **branches, gated_sum=no_gated_sum, step=None)


def returns_lse(sinks: Tensor | None, q: Tensor) -> bool:
    """Return whether an implementation for keys of a cache returns the lse that sinks need; those of a CPU do not."""
    return sinks is None or q.is_cuda


def _share(attended: BranchOutput | Compressed, sinks: Tensor) -> Tensor:
    """Return the output of a branch with the sink in the denominator: ``out * exp(lse) / (exp(lse) + exp(sink))``."""
    if attended.lse is None:
        raise ValueError("impl: expected an implementation that returns lse, for attention sinks, got one without")
    share = torch.sigmoid(attended.lse - sinks.to(attended.lse.dtype)[:, None])
    return attended.out * share.to(attended.out.dtype)[..., None]
