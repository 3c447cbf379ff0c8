"""A compiled layer in the interpreter of Triton: small kernels that Inductor combines give the bits of single ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from flexnsa import NativeSparseAttention, SelectionLoss
from flexnsa.lm import preset
from flexnsa.lm.model.decoder import DecoderLayer, quick_options
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.emitted.machine_code import resources, without_machine_code
from tests.emitted.targets import TARGETS
from tests.support.inputs import SMALL


@pytest.mark.parametrize("packed", [False, True])
def test_combined_kernels_have_the_bits_of_single_ones_in_fewer_launches(packed: bool) -> None:
    sizes = replace(SMALL, index_heads=2, index_block_size=8, index_stride=8)
    layer = NativeSparseAttention(32, 2, 1, 16, config=sizes, preset="text")

    def run(x: Tensor, ids: Tensor | None, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        selection = SelectionLoss(seed=0, step=0)
        out = torch.func.functional_call(layer, weights, (x,), {"document_ids": ids, "selection": selection})
        return out, torch.as_tensor(selection.total)

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        weights = {name: (torch.randn(x.shape) / 5).requires_grad_() for name, x in layer.named_parameters()}
        ids = torch.arange(150, dtype=torch.int32)[None] // 100 if packed else None
        return torch.randn(1, 150, 32, requires_grad=True), ids, weights

    results, launches = [], []
    for options in ({}, quick_options({})["options"]):
        with inductor_config.patch(options):
            emitted = emit(run, make)
        arguments = make()
        out, loss = interpreted(emitted)(*arguments)
        assert loss > 0
        leaves = arguments[0], *arguments[2].values()
        results.append([out, loss, *torch.autograd.grad(out.square().sum() + loss, leaves)])
        launches.append(sum(module.source.count(".run(") for module in emitted.modules))
    assert all(map(torch.equal, *results))
    assert launches[1] < 0.6 * launches[0]


def test_combined_kernels_of_narrow_layers_fit_a_gpu() -> None:
    layer = DecoderLayer(replace(preset("text-125m"), dim=128, num_heads=6, num_kv_heads=1, head_dim=64)).to("meta")
    names, shapes = zip(*((name, x.shape) for name, x in layer.named_parameters()), strict=True)

    @torch.autocast("cuda", torch.bfloat16)
    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    def make() -> tuple[Any, ...]:
        return torch.empty(2, 256, 128, requires_grad=True), *(torch.empty(x, requires_grad=True) for x in shapes)

    with inductor_config.patch(quick_options({})["options"]):
        kernels = emit(run, make).kernels
    with without_machine_code():
        assert max(resources(kernel).shared for kernel in kernels) <= TARGETS["sm_90"].shared_memory
