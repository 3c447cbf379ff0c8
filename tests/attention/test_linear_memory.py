"""What ``sdpa`` keeps and allocates grows with the sequence, not with its square."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.harness.memory import saved_for_backward
from flexnsa import NativeSparseAttention, selection_loss
from tests.support.inputs import SMALL, attend, make_inputs


def bytes_saved(run: Callable[[], Tensor]) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward pass."""
    with saved_for_backward([]) as saved:
        _out = run()
    return saved.total


def largest_allocation(run: Callable[[], Tensor]) -> int:
    """Bytes of the largest allocation of forward and backward; the profiler sees inside operators too."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run().sum().backward()
    return max(event.self_cpu_memory_usage for event in profile.events() or [])


def attention(seq_len: int, impl: str) -> Callable[[], Tensor]:
    x = make_inputs(seq_len).to(torch.float32)
    return lambda: attend(x, impl=impl)


def loss(seq_len: int, num_queries: int = 64, impl: str = "auto") -> Callable[[], Tensor]:
    x = make_inputs(seq_len).to(torch.float32)
    return lambda: selection_loss(x.q, x.k, x.k_cmp, config=SMALL, num_queries=num_queries, impl=impl)


def layer(seq_len: int) -> Callable[[], Tensor]:
    module = NativeSparseAttention(32, 4, 2, 8, config=SMALL, impl="sdpa")
    return lambda: module(torch.randn(1, seq_len, 32))


GROWTH: dict[str, tuple[float, Callable[[int], Callable[[], Tensor]], int]] = {
    "sdpa": (1, lambda length: attention(length, "sdpa"), 256),
    "a layer": (1, layer, 256),
    "the selection loss": (1, loss, 1024),
    "the oracle": (2, lambda length: attention(length, "reference"), 512),
    "the loss of every query": (2, lambda length: loss(length, length, "reference"), 512),
}
"""The power of the length with which memory grows: 2 where the measure has to find S x S."""


@pytest.mark.parametrize("name", GROWTH)
@pytest.mark.parametrize("measure", [bytes_saved, largest_allocation])
def test_memory_is_linear_but_where_it_is_not(measure: Callable[[Callable[[], Tensor]], int], name: str) -> None:
    power, make, length = GROWTH[name]
    growth = math.log2(measure(make(2 * length)) / measure(make(length)))
    assert growth <= 1.10 if power == 1 else growth > 1.8
