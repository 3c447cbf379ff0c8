"""The clock: the order of turns, and what its three kinds count."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from flexnsa.lm.measure.clock import Clock


def test_callers_take_turns_and_rounds_that_warm_up_are_not_counted() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("first", "second")}
    stages: list[str] = []
    times = Clock().turns(calls, 2, warm_up=1, progress=stages.append)
    assert order == ["first", "second"] * 3
    assert {name: len(taken) for name, taken in times.items()} == {"first": 2, "second": 2}
    assert stages[1:3] == ["second, warming up", "first, round 1 of 2"]


def test_sleep_takes_time_of_the_wall_and_none_of_the_processor() -> None:
    assert Clock("wall").time(lambda: time.sleep(0.05)) >= 50
    assert Clock("thread").time(lambda: time.sleep(0.05)) < 40


def test_medians_are_of_each_caller() -> None:
    pauses = iter([0.0, 0.2, 0.0])
    median = Clock().medians({"uneven": lambda: time.sleep(next(pauses)), "none": lambda: None}, 3)
    assert median["uneven"] < 150
    assert median["none"] < 150


@pytest.mark.gpu
@pytest.mark.parametrize("clock", [Clock.of, lambda device: Clock("wall", device)])
def test_a_gpu_is_waited_for(clock: Callable[[str], Clock]) -> None:
    import torch

    x = torch.randn(8192, 8192, device="cuda")
    (x @ x).sum().item()
    assert clock("cuda").time(lambda: x @ x) > 1
