"""A step that draws a token for each row: where its draws go, and how it becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.models.sampling import Sampling
from flexnsa.validation import check_choice

GROUP = 8
"""Most tokens of a row that are drawn before anybody looks at them."""
STEPS = ("auto", "graph", "compiled", "eager")
"""How steps can be run."""
Step = Callable[[], None]
"""Draws a token for each row; all that it reads and writes stays where it is in memory."""


class Drawn(NamedTuple):
    """Tokens int64 ``(B, T)`` on the CPU, and the largest logit behind each: if not finite, the token means nothing."""

    tokens: Tensor
    largest: Tensor


class Draws:
    """The last :data:`GROUP` tokens of each row, newest at the end, kept on the device where the next step reads them.

    Args:
        batch_size: rows ``B``.
        sampling: how to draw.
        device: of the model. Draws are made on CUDA itself, by a generator there, and else on the CPU.
    """

    def __init__(self, batch_size: int, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device if device.type == "cuda" else "cpu")
        self.tokens = torch.zeros(batch_size, GROUP, dtype=torch.int64, device=device)
        self.largest = torch.zeros(batch_size, GROUP, dtype=torch.float64, device=self.generator.device)

    @property
    def newest(self) -> Tensor:
        """Of each row, ``(B, 1)``."""
        return self.tokens[:, -1:]

    def draw(self, logits: Tensor) -> None:
        """Draw a token for each row of ``logits (B, vocab_size)``; waits for nothing."""
        logits = logits.to(self.generator.device)
        drawn = self.sampling.draw_unchecked(logits, self.generator).to(self.tokens.device)
        for last, new in ((self.tokens, drawn), (self.largest, logits.amax(-1))):
            last.copy_(torch.cat((last[:, 1:], new[:, None].to(last.dtype)), dim=1))

    def read(self, count: int) -> Drawn:
        """Give the last ``count`` tokens of each row; waits until they are drawn."""
        return Drawn(*(last[:, -count:].to("cpu", copy=True) for last in (self.tokens, self.largest)))

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Copy all that the next draw depends on."""
        return self.tokens.clone(), self.largest.clone(), self.generator.get_state()

    def restore(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Return to a state that :meth:`state` gave."""
        tokens, largest, generator = state
        self.tokens.copy_(tokens)
        self.largest.copy_(largest)
        self.generator.set_state(generator)


def choose_steps(steps: str, device: torch.device, mods: Collection[str]) -> str:
    """Say how to run steps: ``"auto"`` takes a CUDA graph wherever there can be one.

    Raises:
        TypeError: ``steps`` is no word.
        ValueError: it is none of :data:`STEPS`, or a graph was asked for without CUDA or with mods.
    """
    check_choice("steps", steps, STEPS)
    obstacle = f"with {' and '.join(mods)}" if mods else f"on {device.type}" if device.type != "cuda" else None
    if steps == "graph" and obstacle is not None:
        raise ValueError(f"steps: expected 'compiled' or 'eager' {obstacle}, got 'graph'")
    if steps == "auto":
        return "graph" if obstacle is None else "eager"
    return steps


def capture(step: Step, device: torch.device, *, advice: str, generator: torch.Generator | None = None) -> Step:
    """Capture a step in a CUDA graph, after a call that warms up; give what replays it.

    Args:
        step: to capture.
        device: on which it runs.
        advice: what to say if it cannot be captured.
        generator: by which the step draws, anew each time.

    Raises:
        ValueError: the step waits for the device, which no graph can hold; says the advice.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        try:
            with torch.cuda.graph(graph, stream=stream):
                step()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{advice} ({reason})") from error
    return graph.replay
