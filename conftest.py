"""What holds for the tests of the package and of the benchmarks: those that take a GPU are deselected without one."""

from __future__ import annotations

import pytest
import torch


def pytest_report_header() -> str:
    return f"gpu tests: {'selected' if torch.cuda.is_available() else 'deselected, no CUDA device here'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_gpus, selected, deselected = torch.cuda.device_count(), [], []
    for item in items:
        gpu = item.get_closest_marker("gpu")
        too_few = gpu is not None and num_gpus < gpu.kwargs.get("count", 1)
        (deselected if too_few else selected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected
