"""Checkpointing changes memory, not results, and never selects twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import checkpoint

from flexnsa import NativeSparseAttention
from flexnsa.mods import soft_cap
from flexnsa.operators import opaque
from flexnsa.operators.checkpointing import SELECTION_OPERATORS, keep_selection
from tests.support.inputs import SMALL
from tests.support.operators import Operators


def gradients(layer: torch.nn.Module, x: torch.Tensor, compiled: bool = False, **options) -> list[torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, **options) if options else layer(x)  # pyright: ignore

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x) if compiled else run(x)
    return list(torch.autograd.grad(out.square().sum(), list(layer.parameters())))


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_gradients_are_those_of_the_plain_layer(compiled: bool) -> None:
    layer, x = NativeSparseAttention(32, 6, 2, 8, config=SMALL), torch.randn(2, 70, 32)
    kept = gradients(layer, x, compiled, context_fn=keep_selection)
    torch.testing.assert_close(kept, gradients(layer, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mods", [{}, {"score_mod": soft_cap(2.0)}], ids=["no mod", "mod"])
def test_selection_runs_once_where_plain_checkpointing_runs_it_twice(mods: dict[str, Any]) -> None:
    layer, x = NativeSparseAttention(32, 6, 2, 8, config=SMALL), torch.randn(2, 70, 32)
    for times, options in ((1, {"context_fn": keep_selection}), (2, {"determinism_check": "default"})):
        with Operators() as ran:
            gradients(layer, x, **options, **mods)
        assert sum(len(ran.calls[name.split(".")[1]]) for name in SELECTION_OPERATORS) == times


def test_a_restart_finds_what_was_compiled_of_a_checkpoint() -> None:
    x = torch.randn(8, requires_grad=True)
    counters.clear()
    for _ in range(2):
        torch.compiler.reset()
        torch.compile(checkpoint)(torch.sin, x, use_reentrant=False, context_fn=keep_selection).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"]


def test_another_version_of_the_package_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler keeps on disk has the backward of the version that it was compiled with."""

    @opaque.opaque_operator("copy_of_test_checkpointing")
    def copy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x.clone()

    copy.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    x = torch.ones(8, requires_grad=True)
    for version in (2.0, 3.0):
        torch.compiler.reset()
        monkeypatch.setattr(opaque, "digest_of", lambda _, version=version: str(version))
        copy.register_backward(lambda grad, *_, version=version: (version * grad,), differentiable=1)
        (gradient,) = torch.autograd.grad(torch.compile(lambda x: copy(x)[0].sin())(x).sum(), x)
        torch.testing.assert_close(gradient, version * x.cos())


@pytest.mark.parametrize("learns", [False, True])
def test_each_operator_in_what_is_compiled_names_the_version(learns: bool) -> None:
    """Graphs are also found on disk after autograd was traced, by the calls in them."""
    graphs = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer, x = NativeSparseAttention(32, 6, 2, 8, config=SMALL).requires_grad_(learns), torch.randn(2, 70, 32)
    out = torch.compile(layer, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))(x)
    if learns:
        out.sum().backward()
    nodes = [node for graph in graphs for node in graph.graph.nodes if str(node.target).startswith("flexnsa.")]
    assert len(graphs) == 1 + learns
    assert nodes
    for node in nodes:
        assert opaque.digest_of(Path(opaque.__file__).parents[1]) in (*node.args, *node.kwargs.values()), node
