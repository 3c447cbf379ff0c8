"""One run of a benchmark: the time that is left, the recording, and workloads that run in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.harness.clock import Clock
from benchmarks.harness.memory import AllocatorProbe
from benchmarks.harness.recording import Recording
from benchmarks.harness.setting import Setting
from benchmarks.harness.workloads import Maker, Workload
from flexnsa.lm.measure.memory import MIB

Point = dict[str, Any]
Result = TypeVar("Result")
QUANTITIES = ("peak_mib", "saved_mib", "forward_ms", "backward_ms")
"""What a race measures."""


class Session:
    """Measures until its time is up; what goes wrong becomes a point's label and costs no other point."""

    def __init__(self, setting: Setting, recording: Recording, seconds: float) -> None:
        self.setting, self.recording = setting, recording
        self.clock, self.wall = Clock.of(setting.device), Clock("wall", setting.device)
        self.end = time.monotonic() + seconds

    def attempt(self, point: Point, action: Callable[[], Result]) -> Result | None:
        """Do it unless time is up; None, and a label, if it cannot be done."""
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("over the time limit of the run")
            return action()
        except torch.OutOfMemoryError:
            point["label"] = "out of memory"
        except TimeoutError as error:
            point["label"] = str(error)
        except Exception as error:
            point["label"] = " from ".join(map(_message, _causes(error)))
        print(", ".join(str(value) for value in point.values()), flush=True)
        gc.collect()
        if self.clock.cuda:
            torch.cuda.empty_cache()
        return None

    def race(self, kind: str, makers: Mapping[str, Maker], length: int, rounds: int) -> None:
        """Measure the workloads of one length: memory of each alone, then time in turn."""
        points: dict[str, Point] = {}
        ready: dict[str, tuple[Workload, Tensor | None]] = {}
        for name, make in makers.items():
            point = points[name] = {"kind": kind, "name": name, "seq_len": length}
            started = self.attempt(point, lambda make=make, point=point: self._start(make, length, point))
            if started is not None and rounds:  # without rounds memory alone is asked for: no workload is kept
                ready[name] = started
            del started
            self.recording.add(point)
        times: dict[str, list[list[float]]] = {name: [] for name in ready}
        for _ in range(rounds):
            for name in list(ready):
                if time.monotonic() > self.end:
                    break
                taken = self.attempt(points[name], lambda name=name: self._time(*ready[name]))
                if taken is None:
                    del ready[name]
                else:
                    times[name].append(taken)
        for name, rows in times.items():
            if rows:
                passes = map(statistics.median, zip(*rows, strict=True))
                points[name].update(zip(("forward_ms", "backward_ms"), passes, strict=False), rounds=len(rows))
            print(_line(points[name]), flush=True)
        self.recording.save()

    def _start(self, make: Maker, length: int, point: Point) -> tuple[Workload, Tensor | None]:
        """First call, which compiles, and on a GPU a second that shows the memory."""
        torch.manual_seed(0)
        workload = make(self.setting, length)
        begin, upstream = self.wall.start(), None
        out = workload.forward()
        if workload.differentiate:
            upstream = torch.randn_like(out)
            workload.backward(out, upstream)
        point["first_call_s"] = round(self.wall.since(begin) / 1e3, 2)
        del out
        if self.clock.cuda and workload.differentiate:
            point.update(_memory(workload, upstream))
        return workload, upstream

    def _time(self, workload: Workload, upstream: Tensor | None) -> list[float]:
        """Milliseconds of forward, and of backward if there is one."""
        stamps = [self.clock.start()]
        out = workload.forward()
        stamps.append(self.clock.stamp())
        if workload.differentiate:
            workload.backward(out, upstream)
            stamps.append(self.clock.stamp())
        return self.clock.between(stamps)


def _memory(workload: Workload, upstream: Tensor | None) -> dict[str, float]:
    with AllocatorProbe("cuda") as probe:
        out = workload.forward()
        probe.mark("forward")
        gradients = workload.backward(out, upstream)
        probe.mark("backward")
        del out, gradients
    inputs = [x for x in (*workload.inputs, *workload.differentiate) if isinstance(x, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in inputs}
    return {
        "inputs_mib": sum(storages.values()) / MIB,
        "saved_mib": probe.at["forward"] / MIB,
        "peak_mib": max(probe.peak.values()) / MIB,
    }


def _line(point: Point) -> str:
    cells = [f"{point['seq_len']:7d}  {point['name']:22}"]
    for field, unit in (("forward_ms", "ms forward"), ("backward_ms", "ms backward"), ("peak_mib", "MiB peak")):
        if field in point:
            cells.append(f"{point[field]:10.2f} {unit}")
    return "".join(cells)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from: compilers wrap what went wrong."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _message(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
