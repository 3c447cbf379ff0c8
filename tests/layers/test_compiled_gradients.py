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
LAYERS: dict[str, dict[str, Any]] = {
    "paper": PAPER | {"recompute": ("slc",)},
    "dense stage": PAPER | {"recompute": ("slc",)},
    "text": {},
    "msa": {"config": NSAConfig.msa(select_block_size=8, num_selected_blocks=3), "branches": ["slc"]},
    "qsa": {"config": NSAConfig.qsa(num_selected_blocks=5), "branches": ["slc"]},
}
BY_OTHERS = ("paper", "text")
"""Inductor compiles layers that select in test_export.py and, for packed texts, in test_shared_index.py."""


@pytest.mark.parametrize("name", LAYERS)
def test_packed_rows(name: str) -> None:
    layer = NativeSparseAttention(32, 4, 2, 16, **LAYERS[name])
    layer.attend_densely(("slc",) if name == "dense stage" else None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    ids = torch.tensor([[0] * 30 + [1] * 41 + [2] * 29]).expand(2, -1).contiguous()

    def loss(called: nn.Module, x: Tensor) -> Tensor:
        selection = None if layer.indexer is None else SelectionLoss(seed=0, step=0)
        value = weighted(called(x, document_ids=ids, selection=selection))
        return value if selection is None else value + selection.total

    x = torch.randn(2, 100, 32, requires_grad=layer.indexer is None)
    compile_it = partial(torch.compile, backend=PARTITIONED) if name in BY_OTHERS else torch.compile
    assert_compiled_gradients_are_right(layer, x, loss, compile_it)
