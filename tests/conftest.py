"""What holds for all tests: one thread, a fixed seed, and GPU tests deselected, and counted, where there is no GPU."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# CI draws the same few calls each time; --hypothesis-profile thorough draws new ones, ten thousand of them in all.
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, database=None)
hypothesis.settings.register_profile("thorough", max_examples=160)
hypothesis.settings.load_profile("ci")

# The tests' operations are so small that a second thread costs more than it brings, many times more on a busy machine.
torch.set_num_threads(1)


def pytest_report_header() -> str:
    return "gpu tests: " + ("selected" if torch.cuda.is_available() else "deselected, no CUDA device here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
