"""A step on a cache as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{advice} ({reason})") from error
    return graph.replay
