"""Checkpointing changes memory, not results, and never selects twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flexnsa import NativeSparseAttention
from flexnsa.mods import soft_cap
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
    calls = []
    options: tuple[dict[str, Any], ...] = ({"context_fn": keep_selection}, {"determinism_check": "default"})
    for option in options:
        with Operators() as ran:
            gradients(layer, x, **option, **mods)
        calls.append(sum(len(ran.calls[name.split(".")[1]]) for name in SELECTION_OPERATORS))
    assert calls == [1, 2]
