"""Throughput and memory of attention, its branches, and its baselines, as pytest-benchmark tests.

    pytest benchmarks                                    # quick: minutes on two cores
    pytest benchmarks --smoke                            # the smallest size once: does it all run?
    pytest benchmarks --full --benchmark-autosave
    pytest benchmarks --benchmark-compare --benchmark-compare-fail=median:20%

On a busy machine compare processor time of one thread: ``OMP_NUM_THREADS=1`` and
``--benchmark-timer=time.process_time``, for both runs.

*Forward* records nothing for a backward. A point that runs out of memory or time is a line with that label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks.harness.clock import Clock
from benchmarks.harness.workloads import Workload
from benchmarks.suite.cases import Case

SECONDS_PER_POINT = 2.0
MOST_ROUNDS = 20


def forward(workload: Workload) -> None:
    with torch.no_grad():
        workload.forward()


def forward_backward(workload: Workload) -> None:
    workload.run()


@pytest.mark.parametrize("run", [forward, forward_backward])
def test_attention(
    case: Case,
    run: Callable[[Workload], None],
    memory: dict[str, Any],
    points: list[dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    point = {**asdict(case), "work": run.__name__, **memory}
    points.append(point)
    if "label" in memory:  # a test that asks for the benchmark fixture has to use it
        return
    workload = case.workload()
    if run is forward_backward and not workload.differentiate:
        points.remove(point)  # selection has no backward
        return
    if case.device == "cuda":
        run(workload)  # compiles
    seconds = Clock("wall", case.device).time(lambda: run(workload)) / 1e3
    rounds = (
        1 if request.config.option.extent == "smoke" else int(min(MOST_ROUNDS, max(3, SECONDS_PER_POINT / seconds)))
    )

    benchmark = request.getfixturevalue("benchmark")
    benchmark.pedantic(run, args=(workload,), rounds=rounds)

    median = benchmark.stats.stats.median if benchmark.stats else seconds
    point.update(seconds=median, tokens_per_s=case.seq_len / median)
    benchmark.extra_info.update(point, setting=case.setting().to_dict())
