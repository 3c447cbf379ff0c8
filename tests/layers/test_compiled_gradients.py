"""Every gradient of a layer that Inductor compiles, as users compile it, beside eager PyTorch and fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from tests.support.compiled import PARTITIONED, assert_compiled_gradients_are_right
from tests.support.inputs import SMALL


def weighted(out: Tensor) -> Tensor:
    """Sum an output with weights, so that each of its numbers has a gradient of its own."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()).sum()


PAPER: dict[str, Any] = {"preset": "paper", "config": SMALL, "compression": "linear", "gate": "softmax"}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "paper": [PAPER | {"recompute": ("slc",)}],
    "dense stage": [PAPER | {"recompute": ("slc",)}],
    "text": [{}],
    "msa and qsa": [
        {"config": NSAConfig.msa(select_block_size=8, num_selected_blocks=3), "branches": ["slc"]},
        {"config": NSAConfig.qsa(num_selected_blocks=5), "branches": ["slc"]},
    ],
}
"""Layers of one graph, which all read the same rows."""
BY_OTHERS = ("paper", "text")
"""Inductor compiles layers that select in test_export.py and, for packed texts, in test_shared_index.py."""


class Layers(nn.ModuleList):
    def forward(self, *x: Tensor, **options: Any) -> Tensor:
        return torch.stack([layer(*x, **options) for layer in self])


@pytest.mark.parametrize("name", LAYERS)
def test_packed_rows(name: str) -> None:
    layers = [NativeSparseAttention(32, 4, 2, 16, **options) for options in LAYERS[name]]
    module, teaches = Layers(layers), layers[0].indexer is not None
    for layer in layers:
        layer.attend_densely(("slc",) if name == "dense stage" else None)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    ids = torch.tensor([[0] * 30 + [1] * 41 + [2] * 29]).expand(2, -1).contiguous()

    def loss(called: nn.Module, x: Tensor) -> Tensor:
        selection = SelectionLoss(seed=0, step=0) if teaches else None
        value = weighted(called(x, document_ids=ids, selection=selection))
        return value if selection is None else value + selection.total

    x = torch.randn(2, 100, 32, requires_grad=not teaches)
    compile_it = partial(torch.compile, backend=PARTITIONED) if name in BY_OTHERS else torch.compile
    assert_compiled_gradients_are_right(module, x, loss, compile_it)
