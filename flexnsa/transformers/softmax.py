"""What some models change in their softmax: a cap on the scores, and a sink, one more term of the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.attention.dispatch import choose_implementation
from flexnsa.attention.interface import Implementation
from flexnsa.layers.sinks import returns_lse, with_sinks
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
        """Choose an implementation, as :func:`flexnsa.attention.dispatch.choose_implementation`, with the sinks."""
        cached = cached and returns_lse(self.sinks, q)
        chosen = choose_implementation(impl, q, modded=self.limit is not None, cached=cached, v_dim=v_dim)
        return with_sinks(chosen, self.sinks)
