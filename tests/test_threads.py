"""Heads side by side: on any number of threads the same result, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flexnsa.threads import FEWEST_QUERIES, grouped, repeated, side_by_side
from tests.cases import SMALL, attend, make_inputs


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 99])
@pytest.mark.parametrize("queries", [1, FEWEST_QUERIES])
def test_every_head_is_visited_once(threads: int, size: int, queries: int) -> None:
    x = torch.zeros(2, 6, queries, 1)
    k = torch.empty(2, 3, 5, 1)

    def add(q: Tensor, row: Tensor) -> None:
        assert q.shape[:2].numel() <= max(size, 1)
        q += row[:, :, None, :, None]

    row = torch.arange(2.0)[:, None].expand(2, queries)
    side_by_side(add, (*grouped(k, x), *repeated(k, row)), size)
    assert torch.equal(x, torch.arange(2.0).view(2, 1, 1, 1).expand_as(x))
    assert torch.get_num_threads() == threads


def test_an_error_reaches_the_caller(threads: int) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("a head failed")

    with pytest.raises(RuntimeError, match="a head failed"):
        side_by_side(fail, [torch.zeros(2, 3, 1, FEWEST_QUERIES)], 1)
    assert torch.get_num_threads() == threads


def test_attention_is_the_same_on_any_number_of_threads(threads: int) -> None:
    def run(number: int) -> list[Tensor]:
        torch.set_num_threads(number)
        x = make_inputs(2 * FEWEST_QUERIES, batch=2).to(torch.float64)
        out = attend(x, config=SMALL, impl="sdpa")
        return [out, *torch.autograd.grad(out.square().sum(), list(x.named().values()))]

    for one, many in zip(run(1), run(threads), strict=True):
        torch.testing.assert_close(one, many, rtol=1e-12, atol=1e-12)
