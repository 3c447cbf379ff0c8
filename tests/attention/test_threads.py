"""Heads side by side: on any number of threads the same result, and nothing left behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.attention.plan import THREADED_QUERIES
from flexnsa.attention.threads import grouped, repeated, run_heads_in_threads
from tests.support.inputs import SMALL, attend, make_inputs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 99])
@pytest.mark.parametrize("queries", [1, THREADED_QUERIES])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_head_is_visited_once(threads: int, size: int, queries: int, mode: Any) -> None:
    def add(q: Tensor, row: Tensor) -> None:
        assert q.shape[:2].numel() <= max(size, 1)
        q += row[:, :, None, :, None]

    with mode():
        x, k = torch.zeros(2, 6, queries, 1), torch.empty(2, 3, 5, 1)
        row = torch.arange(2.0)[:, None].expand(2, queries)
        run_heads_in_threads(add, (*grouped(k, x), *repeated(k, row)), size)
    assert torch.equal(x, torch.arange(2.0).view(2, 1, 1, 1).expand_as(x))
    assert torch.get_num_threads() == threads


def test_an_error_reaches_the_caller(threads: int) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("a head failed")

    with pytest.raises(RuntimeError, match="a head failed"):
        run_heads_in_threads(fail, [torch.zeros(2, 3, 1, THREADED_QUERIES)], 1)
    assert torch.get_num_threads() == threads


def test_attention_is_the_same_on_any_number_of_threads(threads: int) -> None:
    def run(number: int) -> list[Tensor]:
        torch.set_num_threads(number)
        x = make_inputs(THREADED_QUERIES).to(torch.float64)
        out = attend(x, config=SMALL, impl="sdpa")
        return [out, *torch.autograd.grad(out.square().sum(), list(x.named().values()))]

    torch.testing.assert_close(run(1), run(threads), rtol=1e-12, atol=1e-12)


def many_calls(number: int = 12) -> None:
    def work(q: Tensor) -> None:
        for _ in range(20):
            q.exp_()

    for _ in range(number):
        run_heads_in_threads(work, [torch.zeros(1, 8, 1, THREADED_QUERIES, 4)], 1)


def test_threads_that_start_meanwhile_keep_their_number(threads: int) -> None:
    caller = threading.Thread(target=many_calls)
    caller.start()
    seen: list[int] = []
    while caller.is_alive():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    caller.join()
    assert seen
    assert set(seen) == {threads}


def test_callers_side_by_side_keep_their_number(threads: int) -> None:
    def call(_: int) -> int:
        many_calls(4)
        return torch.get_num_threads()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [threads] * 4
        assert list(pool.map(lambda _: torch.get_num_threads(), range(4))) == [threads] * 4
    assert torch.get_num_threads() == threads


def test_a_number_set_meanwhile_stays(threads: int) -> None:
    def set_another(_: Tensor) -> None:
        if threading.current_thread() is not setter:
            started.set()
            done.wait(10)

    started, done = threading.Event(), threading.Event()
    setter = threading.Thread(target=lambda: (started.wait(10), torch.set_num_threads(3), done.set()))
    setter.start()
    run_heads_in_threads(set_another, [torch.zeros(1, 4, 1, THREADED_QUERIES)], 1)
    setter.join()
    seen: list[int] = []
    new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert seen == [3]
    assert torch.get_num_threads() == threads  # of this thread, which nobody changed


def test_workers_share_the_threads_of_their_caller(threads: int) -> None:
    seen: list[int] = []
    run_heads_in_threads(lambda _: seen.append(torch.get_num_threads()), [torch.zeros(1, 2, 1, THREADED_QUERIES)], 1)
    assert seen == [threads // 2] * 2
