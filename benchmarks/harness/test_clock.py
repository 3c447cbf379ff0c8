"""The clock: the order of turns, and what its three kinds count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.clock import Clock


def test_callers_take_turns_and_rounds_that_warm_up_are_not_counted() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("first", "second")}
    stages: list[str] = []
    times = Clock().turns(calls, 2, warm_up=1, progress=stages.append)
    assert order == ["first", "second"] * 3
    assert {name: len(taken) for name, taken in times.items()} == {"first": 2, "second": 2}
    assert stages[1:3] == ["second, warming up", "first, round 1 of 2"]


@pytest.mark.parametrize(("kind", "counter"), [("wall", "perf_counter"), ("thread", "thread_time")])
def test_each_kind_reads_its_own_counter(kind: Any, counter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.25])
    monkeypatch.setattr(time, counter, lambda: next(seconds))
    assert Clock(kind).time(lambda: None) == pytest.approx(250)


def test_medians_are_of_each_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([1.0, 5.0, 200.0, 5.0, 2.0, 6.0])
    monkeypatch.setattr(Clock, "time", lambda *_: next(taken))
    assert Clock().medians({"uneven": lambda: None, "even": lambda: None}, 3) == {"uneven": 2.0, "even": 5.0}


@pytest.mark.gpu
@pytest.mark.parametrize("clock", [Clock.of, lambda device: Clock("wall", device)])
def test_a_gpu_is_waited_for(clock: Callable[[str], Clock]) -> None:
    import torch

    x = torch.randn(8192, 8192, device="cuda")
    (x @ x).sum().item()
    assert clock("cuda").time(lambda: x @ x) > 1
