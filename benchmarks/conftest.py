"""Options of the benchmark suite, its summary, and what pytest-benchmark's files hold in addition to times."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.harness.clock import Clock
from benchmarks.harness.options import device_type
from benchmarks.harness.recording import environment
from benchmarks.suite.cases import Case, cases
from benchmarks.suite.summary import summary

POINTS = pytest.StashKey[list[dict[str, Any]]]()
MEMORY = pytest.StashKey[dict[Case, dict[str, Any]]]()
device_clock = Clock("wall", "cuda").stamp
"""Seconds, once the device has done all that it was asked to: pytest-benchmark's timer on CUDA."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flexnsa")
    extent = {"dest": "extent", "action": "store_const", "default": "quick"}
    group.addoption("--smoke", **extent, const="smoke", help="the smallest size, once, on one thread")
    group.addoption("--full", **extent, const="full", help="every size, group and precision")
    group.addoption("--device", type=device_type, default="auto", help="cpu, cuda; default: CUDA if there is one")
    group.addoption("--seconds", type=float, default=60.0, help="limit of one point's first run; default: %(default)s")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or every process announces its profiler
    config.stash[POINTS], config.stash[MEMORY] = [], {}
    if config.option.extent == "smoke":  # so small that a second thread costs more than it brings
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    if config.option.device == "cuda":
        config.option.benchmark_timer = f"{__name__}.device_clock"
    # Its table has no memory and no baselines. Ours takes its place, unless runs are compared, which only its does.
    config.option.benchmark_quiet |= not config.option.benchmark_compare


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        option = metafunc.config.option
        metafunc.parametrize("case", cases(option.extent, option.device), ids=str)


@pytest.fixture
def points(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """What the summary is made of; a test adds its own."""
    return pytestconfig.stash[POINTS]


@pytest.fixture
def memory(case: Case, pytestconfig: pytest.Config) -> dict[str, Any]:
    """Memory of the point, measured once for all its tests, or a label; a smoke run leaves out all but two."""
    known, option = pytestconfig.stash[MEMORY], pytestconfig.option
    if case not in known:
        obstacle = case.obstacle()
        if obstacle:
            known[case] = {"label": obstacle}
        elif option.extent == "smoke" and case.name not in ("NSA", "flash SDPA"):
            known[case] = {}
        else:
            known[case] = case.memory(option.seconds)
    return known[case]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[POINTS]:
        terminalreporter.section("attention")
        terminalreporter.write_line(summary(config.stash[POINTS], environment()))


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: object, output_json: dict[str, Any]) -> None:  # noqa: ARG001
    output_json["environment"] = environment()
    output_json["labelled"] = [point for point in config.stash[POINTS] if "label" in point]
