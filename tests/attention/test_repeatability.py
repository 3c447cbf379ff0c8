"""The same inputs give the same bits, and are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.inputs import Inputs, attend, make_inputs

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])


@impls
@pytest.mark.usefixtures("threads")
def test_twice_the_same_bits(impl: str) -> None:
    x = make_inputs(300, batch=2, group=4, dtype=torch.float32).to(torch.float32)

    def run() -> list[Tensor]:
        out = attend(x, impl=impl)
        return [out, *torch.autograd.grad(out.square().sum(), list(x.named().values()))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@impls
def test_gradients_do_not_depend_on_other_inputs_requiring_one(impl: str) -> None:
    x = make_inputs(50).to(torch.float64)
    every = dict(zip(x.named(), torch.autograd.grad(attend(x, impl=impl).sum(), list(x.named().values())), strict=True))
    for name, tensor in x.named().items():
        only = Inputs(**{n: t if n == name else t.detach() for n, t in x.named().items()})
        torch.testing.assert_close(torch.autograd.grad(attend(only, impl=impl).sum(), tensor)[0], every[name])
