"""Training steps that a CUDA graph replays: the host starts one graph in place of thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Graphed:
    """A function of CUDA tensors that is captured at its second call, and replayed from its third call on.

    Each call does what the function does, once: the first two run it, and a capture runs nothing on the device. A call
    with other shapes or dtypes begins anew. The function may only do what a CUDA graph can: it does not wait for the
    device, and gets all that changes between calls by its tensors, or by what it changes in place itself.

    Args:
        function: of tensors, which returns one. Replays overwrite the tensor that they return.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self._kinds: list[tuple[torch.Size, torch.dtype]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._result = torch.empty(0)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Do what the function does, once."""
        kinds = [(x.shape, x.dtype) for x in tensors]
        if kinds != self._kinds:
            self._kinds, self._graph = kinds, None
            return self.function(*tensors)
        if self._graph is None:
            return self._capture(*tensors)
        for static, x in zip(self._tensors, tensors, strict=True):
            static.copy_(x)
        self._graph.replay()
        return self._result

    def _capture(self, *tensors: Tensor) -> Tensor:
        """Run the function on a stream of its own, as a capture expects, and capture it."""
        current, apart = torch.cuda.current_stream(), torch.cuda.Stream()
        apart.wait_stream(current)
        with torch.cuda.stream(apart):
            result = self.function(*tensors)
        current.wait_stream(apart)
        self._tensors = tuple(x.clone() for x in tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self.function(*self._tensors)
        self._graph = graph
        return result
