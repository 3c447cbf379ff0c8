"""What holds for all tests: one thread, a fixed seed; deselected, and counted, is what cannot run here."""

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--toolkit", metavar="DIR", help="toolkit that emits kernels without a GPU, for tests/emitted")


def pytest_report_header(config: pytest.Config) -> list[str]:
    gpu = "selected" if torch.cuda.is_available() else "deselected, no CUDA device here"
    emitted = "selected" if config.getoption("--toolkit") else "deselected, no --toolkit"
    return [f"gpu tests: {gpu}", f"emitted kernels: {emitted}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without_gpu, without_toolkit = not torch.cuda.is_available(), not config.getoption("--toolkit")
    selected, deselected = [], []
    for item in items:
        wants_gpu, wants_toolkit = item.get_closest_marker("gpu"), "toolkit" in getattr(item, "fixturenames", ())
        cannot_run = (wants_gpu and without_gpu) or (wants_toolkit and without_toolkit)
        (deselected if cannot_run else selected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
