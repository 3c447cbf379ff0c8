"""What processes that measure together share: points that all of them know of, and times of the slowest."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness.clock import Clock
from benchmarks.harness.recording import Recording
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.parallel import Ranks

Point = dict[str, Any]


class Together:
    """Measures until its time is up, the same points on all ranks; rank 0 records them.

    Args:
        ranks: that have been joined.
        device: of this one.
        recording: of rank 0; others keep theirs in memory.
        until: seconds since the epoch.
        rounds: of which a time is the median.
    """

    def __init__(self, ranks: Ranks, device: torch.device, recording: Recording, until: float, rounds: int) -> None:
        self.ranks, self.recording, self.until, self.rounds = ranks, recording, until, rounds
        self.device = device
        self.clock = Clock("wall", self.device.type)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (ranks.world_size,))

    def point(self, point: Point, measure: Callable[[], Point]) -> Point:
        """Record ``point`` with what ``measure`` returns, or with the error of a rank."""
        label = "over the time limit of the run" if time.time() > self.until - 20 else ""
        if not any(self.ranks.gather(label)):
            begin = time.monotonic()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                point |= measure()
            except Exception as error:
                label = f"{type(error).__name__}: {str(error).strip()[:300]}"
            if self.device.type == "cuda":
                point["peak_mib"] = torch.cuda.max_memory_allocated() / MIB
            point["took_s"] = round(time.monotonic() - begin, 1)
        labels = [label for label in self.ranks.gather(label) if label]
        if labels:
            point["label"] = labels[0]
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.recording.add(point)
        if self.ranks.rank == 0:
            print(*(f"{name} {value}" for name, value in point.items()), sep=", ", flush=True)
        return point

    def times(self, *parts: Callable[[], object], rounds: int | None = None) -> list[float]:
        """Milliseconds of some parts, done one after the other: medians, of the slowest rank."""
        rows: list[list[float]] = []
        for _ in range(rounds or self.rounds):
            self.meet()
            stamps = [self.clock.start()]
            for part in parts:
                part()
                stamps.append(self.clock.stamp())
            rows.append(self.clock.between(stamps))
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        return [max(each) for each in zip(*self.ranks.gather(medians), strict=True)]

    def meet(self) -> None:
        """Wait for all ranks, and for all that they have asked of their devices."""
        self.clock.wait()
        dist.all_reduce(torch.zeros(1))  # on the CPU: waiting keeps no device busy
