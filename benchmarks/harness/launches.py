"""The kernels of a call: how many there are, each of which costs the host some microseconds, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

COPIES = ("Memcpy", "Memset")
"""Prefixes of copies and fills in the profiler, which are not kernels."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Milliseconds of all launches of a kernel, and their number."""

    name: str
    ms: float
    launches: int


class TimeRange(Protocol):
    """From when to when."""

    def elapsed_us(self) -> float:
        """Return the microseconds between."""
        ...


class DeviceEvent(Protocol):
    """The fields of a profiler's event that are read here."""

    name: str
    device_type: DeviceType
    is_user_annotation: bool | None

    @property
    def time_range(self) -> TimeRange:
        """When it ran."""
        ...


def count_launches(call: Callable[[], object]) -> int:
    """Count the kernels that one call runs on CUDA; call it once before, to exclude compilation and tuning."""
    return sum(kernel.launches for kernel in time_kernels(call))


def time_kernels(call: Callable[[], object]) -> list[KernelTime]:
    """Time the kernels that one call runs on CUDA, the longest first; call it once before, as for their number."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return kernel_times(profiled.events() or ())


def kernel_times(events: Iterable[DeviceEvent]) -> list[KernelTime]:
    """Add up a profiler's events by kernel, without copies and named regions, the longest first."""
    times: dict[str, list[float]] = {}
    for event in events:
        on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if on_device and not event.name.startswith(COPIES):
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    kernels = [KernelTime(name, sum(each) / 1e3, len(each)) for name, each in times.items()]
    return sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)
