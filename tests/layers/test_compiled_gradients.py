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

MSA = NSAConfig.msa(select_block_size=8, num_selected_blocks=3)
QSA = NSAConfig.qsa(num_selected_blocks=5)


def weighted(out: Tensor) -> Tensor:
    """Sum an output with weights, so that each of its numbers has a gradient of its own."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).cos()).sum()


@pytest.mark.parametrize("dense", [False, True])
def test_packed_rows_of_a_layer_that_selects_or_is_in_its_dense_stage(dense: bool) -> None:
    options: dict[str, Any] = {"config": SMALL, "compression": "linear", "gate": "softmax", "recompute": ("slc",)}
    layer = NativeSparseAttention(32, 4, 2, 16, preset="paper", **options)
    layer.attend_densely(("slc",) if dense else None)
    ids, x = (torch.arange(150) >= 60).long().expand(2, -1), torch.randn(2, 150, 32, requires_grad=True)
    # Inductor compiles layers that select in the tests below.
    compile_it = torch.compile if dense else partial(torch.compile, backend=PARTITIONED)
    assert_compiled_gradients_are_right(layer, x, lambda called, x: weighted(called(x, document_ids=ids)), compile_it)


ALONE: list[dict[str, Any]] = [{"config": config, "branches": ["slc"]} for config in (MSA, QSA)]


@pytest.mark.parametrize("options", [{}, *ALONE], ids=["text", "msa", "qsa"])
def test_packed_rows_with_the_loss_of_an_indexer(options: dict[str, Any]) -> None:
    layer = NativeSparseAttention(32, 4, 2, 16, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    ids = torch.tensor([[0] * 30 + [1] * 41 + [2] * 29]).expand(2, -1).contiguous()

    def loss(called: nn.Module, x: Tensor) -> Tensor:
        selection = SelectionLoss(seed=0, step=0)
        return weighted(called(x, document_ids=ids, selection=selection)) + selection.total

    # Inductor compiles layers of a text, one by one, in test_shared_index.py.
    compile_it = torch.compile if options else partial(torch.compile, backend=PARTITIONED)
    assert_compiled_gradients_are_right(layer, torch.randn(2, 100, 32), loss, compile_it)
