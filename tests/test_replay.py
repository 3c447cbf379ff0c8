"""Replayed functions do what the functions do. Kernels here run on the CPU, on tensors or on addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from flexnsa.operators import replay
from flexnsa.operators.opaque import opaque_operator
from flexnsa.operators.replay import Allocate, Clear, Free, Launch, Replayed, recorder


def launch(kernel: Callable[..., None], *arguments: object) -> None:
    """Launch a kernel as :class:`flexnsa.attention.triton.kernels.kernel.Kernel` does."""
    kernel(*arguments)
    record = recorder()
    if record is not None:
        record.launch(kernel, arguments)


def numbers(x: Tensor | int, count: int) -> Any:
    address = x.data_ptr() if isinstance(x, Tensor) else x
    return (ctypes.c_float * count).from_address(address)


def add(out: Tensor | int, x: Tensor | int, y: Tensor | int, count: int, factor: float) -> None:
    """Store ``x + factor * y``."""
    to, left, right = (numbers(each, count) for each in (out, x, y))
    for i in range(count):
        to[i] = left[i] + factor * right[i]


def sums(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return ``x + factor * y`` and its transpose, by way of halves and of memory that is filled with 0 and freed."""
    (rows, columns), half = x.shape, x.shape[0] // 2
    out, other = x.new_empty(rows, columns), torch.empty(columns, rows, dtype=x.dtype).t()
    for part in (slice(0, half), slice(half, rows)):
        scratch = torch.empty_like(x[part]).zero_()
        launch(add, scratch, scratch, y[part], half * columns, factor)
        launch(add, out[part], x[part], scratch, half * columns, 1.0)
    other_rows = other.t()
    for column in range(columns):
        for row in range(rows):
            launch(add, other_rows[column, row], x[row, column], y[row, column], 1, factor)
    return out, other


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randn(*shape)


def test_later_calls_are_replayed_for_other_tensors() -> None:
    counted = Mock(wraps=sums)
    replayed = Replayed(counted)
    kept = []
    for _ in range(5):
        x, y = drawn(4, 3)
        out, other = replayed(x, y, 0.5)
        kept.append((x, y, out, other))
    assert counted.call_count == 2
    for x, y, out, other in kept:
        torch.testing.assert_close(out, x + 0.5 * y)
        torch.testing.assert_close(other, x + 0.5 * y)
        assert (out.stride(), other.stride()) == ((3, 1), (1, 4))


CHANGES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "length": lambda: (*drawn(6, 3), 0.5),
    "number": lambda: (*drawn(4, 3), 2.0),
    "memory order": lambda: (*(x.t().contiguous().t() for x in drawn(4, 3)), 0.5),
    "alignment": lambda: (*(torch.randn(13)[1:].view(4, 3) for _ in range(2)), 0.5),
    "one tensor twice": lambda: (*[torch.randn(4, 3)] * 2, 0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_of_one_kind_of_arguments(name: str) -> None:
    counted = Mock(wraps=lambda x, y, factor: sums(x.contiguous(), y.contiguous(), factor))
    replayed = Replayed(counted)
    for make in (lambda: (*drawn(4, 3), 0.5), CHANGES[name]) * 4:
        x, y, factor = make()
        for result in replayed(x, y, factor):
            torch.testing.assert_close(result, x + factor * y)
    assert counted.call_count == (6 if name == "memory order" else 4)  # a copy is nothing that can be replayed


def test_memory_is_freed_where_the_function_frees_it() -> None:
    replayed = Replayed(sums)
    for _ in range(2):
        replayed(*drawn(2, 1), 0.5)
    (plan,) = replayed._plans.values()
    kinds = [type(step) for step in plan.steps]
    # The second scratch is cleared before its name leaves the first.
    first, second = [Allocate, Clear, Launch, Launch], [Allocate, Clear, Free, Launch, Launch]
    assert kinds == [Allocate, Allocate, *first, *second, Launch, Launch]


NOT_REPLAYED: dict[str, Callable[[Tensor], Any]] = {
    "an operation of PyTorch": lambda x: x + 1,
    "a view of an argument": lambda x: x[1:],
    "the argument": lambda x: x,
    "two results in one memory": lambda x: tuple(torch.empty_like(x).zero_().split(1)),
    "a tensor from elsewhere": lambda x: _filled(x, ELSEWHERE),
    "a kernel that cannot be recorded": lambda x: _unrecorded(x),
    "an operation without a result": lambda x: (
        torch.ops.aten._assert_async(x[:1, :1].reshape(())),
        torch.empty_like(x).zero_(),
    )[1],
    "an argument that is changed": lambda x: x.zero_(),
    "a result of another dtype": lambda x: torch.empty_like(x).zero_().view(torch.int32),
    "zeros of another dtype": lambda x: torch.empty_like(x).view(torch.int32).zero_(),
}
ELSEWHERE = torch.ones(2, 2)


def _filled(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    launch(add, out, x, y, x.numel(), 1.0)
    return out


def _unrecorded(x: Tensor) -> Tensor:
    record = recorder()
    if record is not None:
        record.give_up()
    return _filled(x, x)


def _fail_at_last(x: Tensor) -> Tensor:
    return torch.empty_like(x) if recorder() is None else x[5]


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_everything_else_is_called(name: str) -> None:
    counted = Mock(wraps=NOT_REPLAYED[name])
    replayed = Replayed(counted)
    for _ in range(4):
        x = torch.randn(2, 2)
        torch.testing.assert_close(replayed(x), NOT_REPLAYED[name](x), rtol=0, atol=0)
    assert counted.call_count == 4


@opaque_operator("rows_of_test_replay", launches_kernels=True)
def _rows(x: Tensor, y: Tensor) -> Tensor:
    return _filled(x.contiguous(), y.to(torch.float32).reshape(-1).contiguous().view(x.shape))


COPIED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "nothing": lambda x: (x, x * 2),
    "columns": lambda x: (x.t(), x.t() * 2),
    "one number": lambda x: (x, (x * 2)[:1, :1].expand_as(x)),
    "another dtype": lambda x: (x, (x * 2).double()),
}


@pytest.mark.parametrize("name", COPIED)
@pytest.mark.parametrize("inference", [False, True])
def test_copies_are_not_taken_for_views_below_the_dispatcher(name: str, inference: bool) -> None:
    """There ``contiguous``, ``to`` and ``reshape`` are operations that may return either."""
    with torch.inference_mode(inference):
        for _ in range(5):
            x, y = COPIED[name](torch.randn(4, 4))
            torch.testing.assert_close(_rows(x, y), (x + y).float())


def test_tensors_of_a_subclass_are_not_replayed() -> None:
    counted = Mock(wraps=lambda x: _filled(x, x))
    replayed = Replayed(counted)
    for _ in range(3):
        replayed(torch.nn.Parameter(torch.ones(2, 2)))
    assert counted.call_count == 3


def test_a_recorder_is_of_its_own_call_alone() -> None:
    replayed = Replayed(lambda x: _filled(x, x))
    for _ in range(2):
        replayed(torch.ones(2, 2))
        assert recorder() is None
    failing = Replayed(_fail_at_last)
    failing(torch.ones(2))
    with pytest.raises(IndexError):
        failing(torch.ones(2))
    assert recorder() is None


def test_lengths_that_always_change_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_PLANS", 8)
    replayed = Replayed(lambda x: _filled(x, x))
    for length in range(1, 50):
        for _ in range(2):
            replayed(torch.ones(length, 1))
        assert max(len(replayed._called), len(replayed._plans)) <= 8


def test_the_precision_of_products_is_part_of_a_plan() -> None:
    counted = Mock(wraps=lambda x: _filled(x, x))
    replayed = Replayed(counted)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high") * 3:
            torch.set_float32_matmul_precision(precision)
            replayed(torch.ones(2, 2))
    finally:
        torch.set_float32_matmul_precision(before)
    assert counted.call_count == 4
