"""What counts as a kernel among the events of a profiler, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.launches import KernelTime, count_launches, kernel_times, time_kernels


@dataclass
class Interval:
    """As the profiler's."""

    us: float

    def elapsed_us(self) -> float:
        """Return its duration."""
        return self.us


@dataclass
class Event:
    """As the profiler's."""

    name: str
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool | None = False
    time_range: Interval = field(default_factory=lambda: Interval(500.0))


def test_copies_named_regions_and_the_processor_are_no_kernels() -> None:
    kernels = [Event("triton_poi_fused_add_0"), *(2 * [Event("ampere_bf16_gemm", is_user_annotation=None)])]
    others = [
        Event("Memcpy DtoD (Device -> Device)"),
        Event("Memset (Device)"),
        Event("## Call CompiledFxGraph", is_user_annotation=True),
        Event("cudaLaunchKernel", DeviceType.CPU),
    ]
    expected = [KernelTime("ampere_bf16_gemm", 1.0, 2), KernelTime("triton_poi_fused_add_0", 0.5, 1)]
    assert kernel_times(kernels + others) == expected, "the longest first"


def test_events_of_the_profiler_are_what_is_counted_in() -> None:
    x = torch.ones(3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        x = x + x
    events = list(profiled.events() or ())
    assert any(event.name == "aten::add" for event in events)
    assert kernel_times(events) == []


@pytest.mark.gpu
def test_each_kernel_counts_once() -> None:
    x = torch.ones(3, device="cuda")
    torch.empty_like(x).copy_(x)
    assert count_launches(lambda: torch.empty_like(x).copy_(x + x).mul_(2)) == 2
    assert all(0 < kernel.ms < 1 for kernel in time_kernels(lambda: x + x))
