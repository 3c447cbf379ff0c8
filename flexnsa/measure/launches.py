"""How many kernels a GPU is asked to run: each costs some microseconds of a processor, however little it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

COPIES = ("Memcpy", "Memset")
"""How the profiler begins the names of copies and fills, which are no kernels."""


class DeviceEvent(Protocol):
    """What is read of a profiler's event."""

    name: str
    device_type: DeviceType
    is_user_annotation: bool | None


def count_launches(call: Callable[[], object]) -> int:
    """Kernels that one call runs on CUDA, what it compiles or tunes first included: call it once before."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return num_kernels(profiled.events() or ())


def num_kernels(events: Iterable[DeviceEvent]) -> int:
    """Kernels among a profiler's events; neither copies nor the regions that callers name."""
    return sum(
        event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith(COPIES)
        for event in events
    )
