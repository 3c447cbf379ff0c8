"""Sampling: drawing the next token from logits."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.primitives import check_number, check_positive_int, check_tensor, check_type, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The distribution to draw from: the likeliest tokens, flattened or sharpened by a temperature.

    Args:
        temperature: divides the logits; 0 takes the likeliest token, infinity any whose logit is not ``-inf``.
        top_k: draw from this many of the likeliest tokens.
        top_p: draw from the smallest set of likeliest tokens that have at least this probability together.

    Raises:
        TypeError: a field is not a number.
        ValueError: a field is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, float) or self.temperature != torch.inf:
            check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None:
            check_positive_int("top_k", self.top_k)
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one token for each row of ``logits (B, vocab_size)``, int64 ``(B,)``.

        Raises:
            TypeError: an argument is not of its kind.
            ValueError: ``logits`` has another shape or dtype, or is on another device than the generator.
            FloatingPointError: a row has a NaN, or nothing but infinities.
        """
        check_tensor("logits", logits, ("B", "V"))
        check_type("generator", generator, torch.Generator)
        if 0 in logits.shape or logits.device != generator.device:
            raise ValueError(f"logits: expected some on {generator.device}, got {describe(logits)}")
        check_finite(logits.amax(-1))
        return self.draw_unchecked(logits, generator)

    def draw_unchecked(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Draw as :meth:`draw` does, without a check of the values, so that a CUDA graph can hold it.

        Where the largest logit of a row is not finite, its token is undefined.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        # Relative to the largest logit and in fp64, so that no temperature is too small to divide by
        best = logits.amax(-1, keepdim=True)
        scaled = (logits.double() - best.double()) / max(self.temperature, sys.float_info.min)
        # A banned token has no probability at any temperature, but -inf / inf is NaN
        probs = scaled.masked_fill(logits == -torch.inf, -torch.inf).float().softmax(-1)
        # Sort by logits, which differ even where a high temperature makes probabilities equal
        token = logits.sort(dim=-1, descending=True, stable=True).indices
        probs = probs.gather(-1, token)
        if self.top_k is not None:
            probs[:, self.top_k :] = 0
        if self.top_p is not None:
            before = probs.cumsum(-1) - probs
            enough = (before >= self.top_p * probs.sum(-1, keepdim=True)) & (before > 0)  # the likeliest always stays
            probs = probs.masked_fill(enough, 0)
        # As torch.multinomial draws once, without its check of the probabilities, which synchronizes
        race = probs / torch.empty_like(probs).exponential_(generator=generator)
        return token.gather(-1, race.argmax(-1, keepdim=True)).squeeze(-1)


def check_finite(largest: Tensor) -> None:
    """Check that the largest logits ``(B,)`` of all rows are finite.

    Raises:
        FloatingPointError: one is not finite.
    """
    if not largest.isfinite().all():
        raise FloatingPointError(f"logits: expected finite numbers, got {largest.tolist()} as the largest")
