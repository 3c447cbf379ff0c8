"""The draws of decoding steps, which stay on the device, and the ways to run a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.lm.generation.sampling import Sampling
from flexnsa.primitives import check_choice

GROUP = 8
"""Largest number of tokens of a sequence that are drawn before the host reads them."""
STEPS = ("auto", "graph", "compiled", "eager")
"""Ways to run a step."""


class Drawn(NamedTuple):
    """Tokens int64 ``(B, T)`` on the CPU, and the largest logit of each: if not finite, the token is undefined."""

    tokens: Tensor
    largest: Tensor


class Draws:
    """The last :data:`GROUP` tokens of each sequence, newest at the end, on the device, for the next step.

    Args:
        batch_size: number of sequences ``B``.
        sampling: how to draw.
        device: device of the model. Draws are made on CUDA by a generator there, and else on the CPU.
    """

    def __init__(self, batch_size: int, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device if device.type == "cuda" else "cpu")
        self.tokens = torch.zeros(batch_size, GROUP, dtype=torch.int64, device=device)
        self.largest = torch.zeros(batch_size, GROUP, dtype=torch.float64, device=self.generator.device)

    @property
    def newest(self) -> Tensor:
        """The newest token of each sequence, ``(B, 1)``."""
        return self.tokens[:, -1:]

    def draw(self, logits: Tensor) -> None:
        """Draw a token for each row of ``logits (B, vocab_size)`` without synchronizing."""
        logits = logits.to(self.generator.device)
        drawn = self.sampling.draw_unchecked(logits, self.generator).to(self.tokens.device)
        for last, new in ((self.tokens, drawn), (self.largest, logits.amax(-1))):
            last.copy_(torch.cat((last[:, 1:], new[:, None].to(last.dtype)), dim=1))

    def read(self, count: int) -> Drawn:
        """Return the last ``count`` tokens of each sequence; synchronizes."""
        return Drawn(*(last[:, -count:].to("cpu", copy=True) for last in (self.tokens, self.largest)))

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the state that the next draw depends on."""
        return self.tokens.clone(), self.largest.clone(), self.generator.get_state()

    def restore(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Restore a state that :meth:`state` returned."""
        tokens, largest, generator = state
        self.tokens.copy_(tokens)
        self.largest.copy_(largest)
        self.generator.set_state(generator)


def choose_steps(steps: str, device: torch.device, mods: Collection[str]) -> str:
    """Return how to run steps: ``"auto"`` takes a CUDA graph wherever one is possible.

    Raises:
        TypeError: ``steps`` is not a string.
        ValueError: it is not one of :data:`STEPS`, or names a graph without CUDA or with mods.
    """
    check_choice("steps", steps, STEPS)
    obstacle = f"with {' and '.join(mods)}" if mods else f"on {device.type}" if device.type != "cuda" else None
    if steps == "graph" and obstacle is not None:
        raise ValueError(f"steps: expected 'compiled' or 'eager' {obstacle}, got 'graph'")
    if steps == "auto":
        return "graph" if obstacle is None else "eager"
    return steps
