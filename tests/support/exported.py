"""Exported programs and compiled graphs that serve every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

from tests.support.comparison import largest
from tests.support.compiled import assert_kept_apart

LENGTHS = (64, 79, 80, 1000)
MOST_GRAPHS = {"automatic": 2, "dynamic": 2, "marked": 1}
"""``automatic`` begins with one for its first length; ``dynamic=True`` makes its first one again, for its numbers."""

Inputs = Callable[[int, int], dict[str, Any]]
"""``(B, S)`` to keyword arguments, tensors ``(B, S, ...)``."""


@torch.no_grad()
def assert_one_program_serves_all(
    module: nn.Module, inputs: Inputs, *, any_batch: bool = True, strict: bool = False
) -> None:
    """Export the module for a range of lengths, of which nothing else is asked, and compare what it returns."""
    sizes = {1: Dim("S", min=min(LENGTHS), max=4096)} | ({0: Dim("B", min=2, max=8)} if any_batch else {})
    example = inputs(3 if any_batch else 1, 100)
    dims = dict.fromkeys(example, sizes)
    exported = export(module, (), kwargs=example, dynamic_shapes=dims, strict=strict).module()
    for length in LENGTHS:
        given = inputs(2 if any_batch else 1, length)
        assert torch.equal(_tensor(exported(**given)), _tensor(module(**given)))


def assert_few_graphs_serve_all(
    module: nn.Module, inputs: Inputs, how: str, *, backend: str = "aot_eager", more: int = 0
) -> None:
    """Compile the module for lengths as users do, compare what it returns and every gradient, and count the graphs."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=graphs, dynamic=True if how == "dynamic" else None)
    for length in (80, 70, 97):
        given = inputs(2, length)
        want = _gradients(module, given)
        if how == "marked":
            for x in given.values():
                torch._dynamo.mark_dynamic(x, 1)
        for x, plain in zip(_gradients(compiled, given), want, strict=True):
            # A sum of many terms is rounded by the size of these, which the largest element tells.
            torch.testing.assert_close(x, plain, rtol=1.3e-6, atol=1e-5 * max(1.0, largest(plain)))
        if backend == "inductor":
            assert_kept_apart(lambda: compiled(**given), [*given.values(), *module.parameters()])  # noqa: B023
    assert graphs.frame_count <= MOST_GRAPHS[how] + more


def _gradients(called: Any, inputs: dict[str, Any]) -> list[Tensor]:
    out = _tensor(called(**inputs))
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    leaves = [x for x in (*called.parameters(), *inputs.values()) if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def _tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits
