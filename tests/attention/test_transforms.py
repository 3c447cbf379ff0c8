"""Transforms of ``torch.func``, which know no checkpoints, through what is run again in backward: equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from flexnsa import NativeSparseAttention
from flexnsa.config import BRANCHES
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.operators.checkpointing import keep_selection
from tests.support.inputs import SMALL

X = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(1))
Loss = Callable[[dict[str, Tensor], Tensor], Tensor]
TRANSFORMS: dict[str, Callable[[Loss, dict[str, Tensor]], Any]] = {
    "grad": lambda loss, parameters: grad(loss)(parameters, X),
    "vjp": lambda loss, parameters: vjp(lambda x: loss(parameters, x), X)[1](torch.ones(())),
    "vmap": lambda loss, parameters: vmap(lambda x: loss(parameters, x[None]))(X),
    "vmap of grad": lambda loss, parameters: vmap(lambda x: grad(loss)(parameters, x[None]))(X),
    "jvp": lambda loss, parameters: jvp(lambda x: loss(parameters, x), (X,), (X,)),
}
CASES = [("sdpa", name) for name in TRANSFORMS if name != "jvp"] + [("reference", name) for name in TRANSFORMS]


def loss_of(layer: nn.Module) -> Loss:
    return lambda parameters, x: functional_call(layer, parameters, (x,)).square().sum()


def layer(impl: str, **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(16, 2, 1, 8, config=SMALL, impl=impl, **options)


@pytest.mark.parametrize("recompute", [("cmp",), BRANCHES])
@pytest.mark.parametrize(("impl", "name"), CASES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_recomputed_branches_equal_others_in_transforms(impl: str, name: str, recompute: tuple[str, ...]) -> None:
    plain, again = layer(impl), layer(impl, recompute=recompute)
    parameters = {name: x.detach() for name, x in plain.named_parameters()}
    found, want = (tree_leaves(TRANSFORMS[name](loss_of(each), parameters)) for each in (again, plain))
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_checkpointed_layers_give_what_others_do(attention: Any) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "nsa": SMALL}
    found: list[Any] = []
    for checkpointing in (False, True, "0:1"):
        torch.manual_seed(0)
        model = DecoderLM(DecoderConfig(dim=16, attention=attention, checkpointing=checkpointing, **sizes))
        parameters = {name: x.detach() for name, x in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], model: DecoderLM = model) -> Tensor:
            return functional_call(model, parameters, (TOKENS,)).square().mean()

        found.append(grad(loss)(parameters))
    for others in found[1:]:
        assert all(map(torch.equal, tree_leaves(found[0]), tree_leaves(others)))


def test_a_checkpoint_that_keeps_the_selection_raises_in_transforms() -> None:
    attention = layer("sdpa")

    def loss(x: Tensor) -> Tensor:
        return checkpoint(attention, x, use_reentrant=False, context_fn=keep_selection).square().sum()

    with pytest.raises(NotImplementedError, match=r"^keep_selection works in no transform of torch\.func"):
        grad(loss)(X)
