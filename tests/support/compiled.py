"""Gradients of what is compiled, by default by Inductor with its default settings, as users run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support.comparison import assert_as_exact_as_plain

PARTITIONED = "aot_eager_decomp_partition"
"""A backend that cuts a graph into forward and backward as Inductor does, and generates no code."""
Losses = Callable[[Any, Tensor], Tensor]
"""``(module, x)`` to a scalar."""


def assert_compiled_gradients_are_right(
    module: nn.Module, x: Tensor, loss: Losses, compile_it: Callable[[Any], Any] = torch.compile
) -> None:
    """Compare every gradient of the compiled module with eager and fp64; and what it keeps, with itself."""
    plain = gradients(module, module, x, loss)
    double = deepcopy(module).double()
    exact = gradients(double, double, x.double() if x.is_floating_point() else x, loss)
    torch.compiler.reset()
    compiled = compile_it(module)
    called = module if compiled is None else compiled  # a method such as compile_layers changes its module
    assert_as_exact_as_plain(gradients(module, called, x, loss), plain, exact, factor=3)
    assert_kept_apart(lambda: loss(called, x), [x, *module.parameters(), *module.buffers()])


def gradients(module: nn.Module, called: Any, x: Tensor, loss: Losses) -> dict[str, Tensor]:
    """Return the loss and the gradient of each parameter, and of x where it requires one."""
    leaves = {name: p for name, p in module.named_parameters() if p.requires_grad}
    x = x.detach().requires_grad_(x.requires_grad)
    leaves |= {"x": x} if x.requires_grad else {}
    value = loss(called, x)
    each = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"loss": value.detach(), **dict(zip(leaves, each, strict=True))}


def assert_kept_apart(run: Callable[[], Any], inputs: Sequence[Tensor]) -> None:
    """Demand that no two activations kept for backward share numbers: Inductor takes each for a buffer of its own."""
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run()
    of_caller = {x.untyped_storage().data_ptr() for x in inputs}
    activations = [x for x in kept if x.numel() and x.untyped_storage().data_ptr() not in of_caller]
    assert activations
    for a, b in combinations(activations, 2):
        is_one = (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())  # an input of two graphs
        if not is_one and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            assert not (_places(a) & _places(b)).any(), f"{a.shape} {a.stride()} shares numbers with {b.shape}"


def _places(x: Tensor) -> Tensor:
    """Mark the bytes of its memory that a tensor reads, in units of its numbers."""
    marks = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=torch.bool)
    marks.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return marks
