"""The number of kernel launches, each of which costs the host some microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

COPIES = ("Memcpy", "Memset")
"""Prefixes of copies and fills in the profiler, which are not kernels."""


class DeviceEvent(Protocol):
    """The fields of a profiler's event that are read here."""

    name: str
    device_type: DeviceType
    is_user_annotation: bool | None


def count_launches(call: Callable[[], object]) -> int:
    """Count the kernels that one call runs on CUDA; call it once before, to exclude compilation and tuning."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return num_kernels(profiled.events() or ())


def num_kernels(events: Iterable[DeviceEvent]) -> int:
    """Count the kernels among a profiler's events, without copies and named regions."""
    return sum(
        event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith(COPIES)
        for event in events
    )
