"""What counts as a kernel among the events of a profiler."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from flexnsa.lm.measure.launches import count_launches, num_kernels


@dataclass
class Event:
    name: str
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool | None = False


def test_copies_named_regions_and_the_processor_are_no_kernels() -> None:
    kernels = [Event("triton_poi_fused_add_0"), Event("ampere_bf16_gemm", is_user_annotation=None)]
    others = [
        Event("Memcpy DtoD (Device -> Device)"),
        Event("Memset (Device)"),
        Event("## Call CompiledFxGraph", is_user_annotation=True),
        Event("cudaLaunchKernel", DeviceType.CPU),
    ]
    assert num_kernels(kernels + others) == 2


def test_events_of_the_profiler_are_what_is_counted_in() -> None:
    x = torch.ones(3)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        x = x + x
    events = list(profiled.events() or ())
    assert any(event.name == "aten::add" for event in events)
    assert num_kernels(events) == 0


@pytest.mark.gpu
def test_each_kernel_counts_once() -> None:
    x = torch.ones(3, device="cuda")
    torch.empty_like(x).copy_(x)
    assert count_launches(lambda: torch.empty_like(x).copy_(x + x).mul_(2)) == 2
