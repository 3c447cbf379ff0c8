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
        run()
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


measures = pytest.mark.parametrize("measure", [bytes_saved, largest_allocation])


@measures
def test_sdpa_is_linear(measure: Callable[[Callable[[], Tensor]], int]) -> None:
    assert math.log2(measure(attention(1024, "sdpa")) / measure(attention(512, "sdpa"))) <= 1.10


@measures
def test_a_layer_is_linear(measure: Callable[[Callable[[], Tensor]], int]) -> None:
    assert math.log2(measure(layer(1024)) / measure(layer(512))) <= 1.10


@measures
def test_the_selection_loss_is_linear(measure: Callable[[Callable[[], Tensor]], int]) -> None:
    assert math.log2(measure(loss(2048)) / measure(loss(1024))) <= 1.10
    every_query = measure(loss(1024, 1024, "reference")) / measure(loss(512, 512, "reference"))
    assert math.log2(every_query) > 1.8  # the measure finds S x S where it is


@measures
def test_the_measure_finds_quadratic_memory(measure: Callable[[Callable[[], Tensor]], int]) -> None:
    assert math.log2(measure(attention(1024, "reference")) / measure(attention(512, "reference"))) > 1.8
