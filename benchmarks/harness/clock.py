"""A clock for every measurement of time, and rounds in which calls take turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

Kind = Literal["wall", "thread", "events"]
Name = TypeVar("Name")
CACHE_BYTES = 256 * 2**20
"""More than the second-level cache of any GPU."""


class Clock:
    """Time stamps, and milliseconds between them.

    Args:
        kind: ``"wall"`` synchronizes at every stamp; ``"thread"`` counts the processor time of this thread, which
            depends less on other processes; ``"events"`` are those of CUDA.
        device: type of the timed device.
        cold: flush the second-level cache of a GPU before every start.
    """

    def __init__(self, kind: Kind = "wall", device: str = "cpu", *, cold: bool = False) -> None:
        self.kind, self.cuda = kind, device == "cuda"
        self._flush = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if cold and self.cuda else None

    @classmethod
    def of(cls, device: str) -> Clock:
        """Return the clock for attention: CUDA events with a cold cache, or the wall clock."""
        return cls("events", device, cold=True) if device == "cuda" else cls("wall", device)

    def start(self) -> Any:
        """Return the first stamp of a measurement."""
        if self._flush is not None:
            self._flush.zero_()
        return self.stamp()

    def stamp(self) -> Any:
        """Return the present time on this clock."""
        if self.kind == "events":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.kind == "thread":
            return time.thread_time()
        self.wait()
        return time.perf_counter()

    def between(self, stamps: Sequence[Any]) -> list[float]:
        """Return the milliseconds from each stamp to the next; synchronizes."""
        self.wait()
        pairs = itertools.pairwise(stamps)
        return [a.elapsed_time(b) if self.kind == "events" else (b - a) * 1e3 for a, b in pairs]

    def since(self, start: Any) -> float:
        """Return the milliseconds since a stamp."""
        return self.between([start, self.stamp()])[0]

    def time(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of one call."""
        start = self.start()
        call()
        return self.since(start)

    def turns(
        self,
        calls: Mapping[Name, Callable[[], object]],
        rounds: int,
        *,
        warm_up: int = 0,
        progress: Callable[[str], object] = lambda stage: None,  # noqa: ARG005
    ) -> dict[Name, list[float]]:
        """Return the milliseconds of every call in every round after warm-up; in each round the calls take turns."""
        times: dict[Name, list[float]] = {name: [] for name in calls}
        for number in range(-warm_up, rounds):
            for name, call in calls.items():
                progress(f"{name}, warming up" if number < 0 else f"{name}, round {number + 1} of {rounds}")
                taken = self.time(call)
                if number >= 0:
                    times[name].append(taken)
        return times

    def medians(
        self, calls: Mapping[Name, Callable[[], object]], rounds: int, *, warm_up: int = 0
    ) -> dict[Name, float]:
        """Return the median milliseconds of every call; the calls take turns."""
        turns = self.turns(calls, rounds, warm_up=warm_up)
        return {name: statistics.median(times) for name, times in turns.items()}

    def median(self, call: Callable[[], object], rounds: int, *, warm_up: int = 0) -> float:
        """Return the median milliseconds of one call."""
        return self.medians({"": call}, rounds, warm_up=warm_up)[""]

    def wait(self) -> None:
        """Synchronize with the device."""
        if self.cuda:
            torch.cuda.synchronize()
