"""Attention sinks: for each head a score that takes its share of the probability and has no value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flexnsa.attention.interface import BranchOutput, Compressed, Implementation, no_gated_sum


def with_sinks(implementation: Implementation, sinks: Tensor | None) -> Implementation:
    """Return an implementation whose branches have a sink ``sinks (Hq,)`` in the softmax of each head.

    Blocks are scored without it.
    """
    if sinks is None:
        return implementation

    def shared(branch: Callable[..., BranchOutput | Compressed], *args: object) -> BranchOutput | Compressed:
        attended = branch(*args)
        return attended._replace(out=_share(attended, sinks))

    branches = {name: partial(shared, getattr(implementation, name)) for name in ("compressed", "selected", "window")}
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
