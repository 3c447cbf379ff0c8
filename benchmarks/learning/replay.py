"""A training step in a CUDA graph: hundreds of small kernels, of which each would else wait for its launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]
WARM_UP = 3
"""Steps before the capture; the first compiles."""


class Replay:
    """A step of tokens and targets of one shape, done as it comes at first, and replayed from then on.

    Args:
        step: what to do; it returns a loss, overwrites the gradients of the parameters, and never synchronizes.

    Attributes:
        obstacle: why there is no graph, once it was tried in vain; steps are then done as they come.
    """

    def __init__(self, step: Step) -> None:
        self.obstacle: str | None = None
        self._step, self._steps = step, 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.empty(0)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Do one step; give its loss."""
        if self._steps == WARM_UP:
            self._capture(tokens, targets)
        self._steps += 1
        if self._graph is None:
            return self._aside(tokens, targets)
        for static, current in zip(self._inputs, (tokens, targets), strict=True):
            static.copy_(current)
        self._graph.replay()
        return self._loss.clone()

    def _aside(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Do it on the stream of the capture, where gradients then find what they are added to."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._step(tokens, targets).detach()
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, tokens: Tensor, targets: Tensor) -> None:
        self._inputs = tokens.clone(), targets.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._step(*self._inputs).detach()
        except RuntimeError as error:
            self.obstacle = str(error).partition("\n")[0]
        else:
            self._graph = graph
