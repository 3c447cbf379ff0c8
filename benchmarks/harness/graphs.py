"""CUDA graphs: a call that is captured once and replayed, such as one decoded token or one training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from flexnsa.operators import graphs

Result = TypeVar("Result")


def capture(call: Callable[[], Result]) -> tuple[graphs.Step, Result]:
    """Capture a call after one that warms up; return what replays it, and the result that each replay overwrites."""
    results: list[Result] = []
    advice = "call: expected one that never waits for the device"
    replay = graphs.capture(lambda: results.append(call()), torch.device("cuda"), advice=advice)
    return replay, results[-1]
