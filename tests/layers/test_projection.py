"""Several maps as one product: what it gives, and which maps may not share it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.modules import module

from flexnsa import NativeSparseAttention
from flexnsa.layers import projection
from flexnsa.layers.projection import is_plain, project, project_few, project_together
from tests.support.inputs import SMALL, OnGPU, Packed


def test_one_product_gives_what_many_give_and_leaves_hooks_alone() -> None:
    layer = NativeSparseAttention(32, 6, 2, 8, config=SMALL)
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)][:8]
    assert len(linears) == 8
    x = torch.randn(2, 10, 32)
    together = project_together(x, [linear.weight for linear in linears])
    for got, linear in zip(together, linears, strict=True):
        torch.testing.assert_close(got, linear(x), rtol=1e-5, atol=1e-6)
        assert got.stride(1) % 64 == 0
    seen: list[object] = []
    linears[1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    assert project(x, linears)[1] is seen[0]


def test_a_map_that_is_there_twice_is_called_once_and_learns_from_both() -> None:
    one, other, calls = plain(), plain(), []
    one.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, 4)
    first, second, third = project(x, [one, other, one])
    assert len(calls) == 1
    torch.testing.assert_close((first, second, third), (x @ one.weight.T, x @ other.weight.T, x @ one.weight.T))
    (gradient,) = torch.autograd.grad((first + 2 * third).sum(), one.weight)
    torch.testing.assert_close(gradient, 3 * x.sum((0, 1)).expand(4, -1))


def test_in_one_product_too_a_map_that_is_there_twice_counts_once() -> None:
    one, other, x = plain(), torch.nn.Linear(4, 6, bias=False), torch.randn(2, 3, 4)
    got = [y.as_subclass(torch.Tensor) for y in project(x.as_subclass(OnGPU), [one, one, other])]
    torch.testing.assert_close(got, [one(x), one(x), other(x)])
    assert all(y.stride(1) == 64 for y in got)


def test_kernels_for_a_few_rows_read_a_map_that_is_there_twice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()

    def multiply(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        read.append(len(weights))
        return x @ torch.cat(weights).T

    monkeypatch.setattr(projection, "multiply_few_rows", multiply)
    one, other, x = plain(), torch.nn.Linear(4, 6, bias=False), torch.randn(2, 1, 4)
    torch.testing.assert_close(project_few(x, [one, other, one]), [one(x), other(x), one(x)])
    assert read == [2]


def plain() -> torch.nn.Linear:
    return torch.nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.register_forward_hook(lambda *_: None),
        lambda linear: setattr(linear, "forward", torch.relu),
        lambda linear: setattr(linear, "weight", torch.nn.Parameter(linear.weight.detach().as_subclass(Packed))),
        lambda linear: setattr(linear, "bias", torch.nn.Parameter(torch.zeros(4))),
    ],
)
def test_only_plain_maps_share_a_product(change: Callable[[torch.nn.Linear], object]) -> None:
    linear = plain()
    assert is_plain(linear)
    change(linear)
    assert not is_plain(linear)


def test_no_map_is_plain_while_all_modules_have_a_hook() -> None:
    linear = plain()
    for register in (
        module.register_module_forward_hook,
        module.register_module_forward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert not is_plain(linear)
        handle.remove()
    assert is_plain(linear)
