"""What some models change in their softmax: a cap on the scores, and a sink, one more term of the sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexnsa.attention.seam import BranchOutput, Compressed, Implementation
from flexnsa.attention.table import choose_implementation
from flexnsa.masks.user_mods import ScoreMod


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a model's layer turns scores into probabilities.

    Args:
        scale: factor on the scores; None for ``Dk ** -0.5``.
        limit: scores are kept within it of 0, as ``limit * tanh(score / limit)``; None for any score.
        sinks: ``(Hq,)``, for each head a score that takes its share of the probability and has no value. Blocks are
            scored without it.
    """

    scale: float | None = None
    limit: float | None = None
    sinks: Tensor | None = None

    @property
    def score_mod(self) -> ScoreMod | None:
        """The limit as a user's mod."""
        limit = self.limit
        if limit is None:
            return None

        def cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
            return limit * torch.tanh(score / limit)

        return cap

    def implementation(self, impl: str, q: Tensor, *, cached: bool, v_dim: int) -> Implementation:
        """Choose an implementation, as :func:`flexnsa.attention.table.choose_implementation`, with the sinks."""
        # On a CPU, steps on a cache return no lse, of which sinks are computed.
        cached = cached and (self.sinks is None or q.is_cuda)
        chosen = choose_implementation(impl, q, modded=self.limit is not None, cached=cached, v_dim=v_dim)
        return chosen if self.sinks is None else with_sinks(chosen, self.sinks)


def with_sinks(implementation: Implementation, sinks: Tensor) -> Implementation:
    """Return an implementation whose branches have a sink ``sinks (Hq,)`` in the softmax of each head."""

    def sunk(branch: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*inputs: Any) -> Any:
            attended = branch(*inputs)
            return attended._replace(out=_share(attended, sinks))

        return attend

    branches = {name: sunk(getattr(implementation, name)) for name in ("compressed", "selected", "window")}
    return replace(implementation, **branches, step=None)


def _share(attended: BranchOutput | Compressed, sinks: Tensor) -> Tensor:
    """Return the output of a branch with the sink in the denominator: ``out * exp(lse) / (exp(lse) + exp(sink))``."""
    if attended.lse is None:
        raise ValueError("s_aux: expected an implementation that returns lse with attention sinks, got one without")
    share = torch.sigmoid(attended.lse - sinks.to(attended.lse.dtype)[:, None])
    return attended.out * share.to(attended.out.dtype)[..., None]
