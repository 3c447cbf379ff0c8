"""The sm_90 kernels with mods of the user's, in an interpreter: outputs, and gradients of what a mod captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexnsa import mods
from flexnsa.attention.dispatch import FLEX, REFERENCE
from flexnsa.attention.interface import Call, Implementation
from flexnsa.masks.document import document_positions
from flexnsa.masks.user_mods import merge_mods
from tests.emitted.calls import BRANCHES, TWO_BLOCKS
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.emitted.test_packed_kernels import GROUPS, SCALE, arguments

LENGTHS = (19, 1, 49)


def attention(branch: str, implementation: Implementation) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The branch as a function of its tensors and of the bias by distance."""
    names = {"cmp": "compressed", "slc": "selected", "win": "window"}

    def run(
        bias: Tensor, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, *blocks: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        score_mod = merge_mods(mods.chain(mods.soft_cap(2.0), mods.distance_bias(bias)), mods.banned_span(0, 12))
        positions = document_positions(ids, TWO_BLOCKS)
        function = getattr(implementation, names[branch])
        attended = function(q, k, v, *blocks, Call(TWO_BLOCKS, SCALE, score_mod, positions, positions))
        return attended.out, attended.lse

    return run


@pytest.mark.parametrize("branch", BRANCHES)
def test_modded_kernels_agree_with_the_oracle(branch: str) -> None:
    def make() -> tuple[Tensor, ...]:
        return torch.randn(GROUPS, 9, requires_grad=True), *arguments(branch, LENGTHS)

    module = emit(attention(branch, FLEX), make)
    inputs = make()
    exact = [x.detach().double().requires_grad_() for x in inputs[:4]]
    out, lse = interpreted(module)(*inputs)
    true_out, true_lse = attention(branch, REFERENCE)(*exact, *inputs[4:])
    assert true_lse is not None
    empty = true_lse == -torch.inf
    assert empty.any()
    assert torch.equal(lse == -torch.inf, empty)
    assert (out[empty] == 0).all()

    got = (out, lse.masked_fill(empty, 0.0))
    want = (true_out, true_lse.masked_fill(empty, 0.0))
    seeds = [torch.randn_like(x) for x in got]
    got += torch.autograd.grad(got, inputs[:4], seeds)
    want += torch.autograd.grad(want, exact, [x.double() for x in seeds])
    for name, a, b in zip(("out", "lse", "dbias", "dq", "dk", "dv"), got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name
