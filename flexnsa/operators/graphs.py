"""CUDA graphs: a step on a cache, and a function of tensors such as a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[], None]
"""A step with neither arguments nor results, which reads and writes memory that does not move."""


def capture(step: Step, device: torch.device, *, advice: str, generator: torch.Generator | None = None) -> Step:
    """Capture a step in a CUDA graph, after one call to warm up, and return the function that replays it.

    Args:
        step: to capture.
        device: on which it runs.
        advice: text of the error where it cannot be captured.
        generator: of the random numbers that the step draws at each replay.

    Raises:
        ValueError: the step waits for the device, which no graph can hold.
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
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{advice} ({reason})") from error
    return graph.replay


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
        self._replay: Step | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._result = torch.empty(0)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Do what the function does, once."""
        kinds = [(x.shape, x.dtype) for x in tensors]
        if kinds != self._kinds:
            self._kinds, self._replay = kinds, None
            return self.function(*tensors)
        if self._replay is None:
            return self._capture(*tensors)
        for static, x in zip(self._tensors, tensors, strict=True):
            static.copy_(x)
        self._replay()
        return self._result

    def _capture(self, *tensors: Tensor) -> Tensor:
        """Run the function, which warms up, and capture it."""
        self._tensors = tuple(x.clone() for x in tensors)
        results: list[Tensor] = []

        def step() -> None:
            results.append(self.function(*self._tensors))

        advice = "cuda_graph: expected False for a step that no CUDA graph holds"
        self._replay = capture(step, tensors[0].device, advice=advice)
        result, self._result = results
        return result
