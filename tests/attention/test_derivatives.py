"""Derivatives other than plain backward: each implementation gives the right one or refuses by name, never 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from flexnsa import NativeSparseAttention, mods
from flexnsa.attention.interface import Call
from flexnsa.attention.sdpa.chunks import IntervalInputs
from flexnsa.attention.sdpa.selected_few import SelectedInputs
from flexnsa.attention.selection import SelectionInputs
from flexnsa.attention.selection_loss import SelectionLossInputs
from tests.support.inputs import SMALL, attend, make_inputs

Function = Callable[[Tensor], Tensor]
X = make_inputs(40, kv_heads=1, key_dim=4, value_dim=4)
Q, TANGENT = X.q.detach(), make_inputs(40, kv_heads=1, key_dim=4, value_dim=4, seed=1).q


def energy(f: Function) -> Function:
    """A scalar whose second derivative is not 0."""
    return lambda q: f(q).square().sum()


def twice_backward(f: Function) -> Tensor:
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(energy(f)(q), q, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), q)[0]


def dual(f: Function) -> Tensor:
    with forward_ad.dual_level(), torch.no_grad():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(Q, TANGENT))).tangent
        return torch.zeros(()) if tangent is None else tangent


GIVEN: dict[str, Callable[[Function], Any]] = {
    "grad": lambda f: func.grad(energy(f))(Q),
    "vjp": lambda f: func.vjp(f, Q)[1](TANGENT)[0],
    "vmap": lambda f: func.vmap(f)(torch.stack([Q, TANGENT])),
    "grad of each": lambda f: func.vmap(func.grad(energy(f)))(torch.stack([Q, TANGENT])),
    "grad of all": lambda f: func.grad(lambda x: func.vmap(energy(f))(x).prod())(torch.stack([Q, TANGENT])),
}
REFUSED: dict[str, Callable[[Function], Any]] = {
    "jvp": lambda f: func.jvp(f, (Q,), (TANGENT,))[1],
    "dual numbers": dual,
    "jacfwd": lambda f: func.jacfwd(lambda x: f(x * Q).sum())(torch.ones((), dtype=Q.dtype)),
    "jvp of grad": lambda f: func.jvp(func.grad(energy(f)), (Q,), (TANGENT,))[1],
    "jvp of vmap": lambda f: func.jvp(func.vmap(f), (Q[None],), (TANGENT[None],))[1],
    "grad of jvp": lambda f: func.grad(lambda q: func.jvp(energy(f), (q,), (TANGENT,))[1])(Q),
    "grad of grad": lambda f: func.grad(lambda q: func.grad(energy(f))(q).square().sum())(Q),
    "backward twice": twice_backward,
}


def attention(impl: str, **options: Any) -> Function:
    """The attention as a function of its queries."""
    return lambda q: attend(X.replace(q=q), impl=impl, **options)


@pytest.mark.parametrize("name", GIVEN)
def test_sdpa_gives(name: str) -> None:
    torch.testing.assert_close(GIVEN[name](attention("sdpa")), GIVEN[name](attention("reference")))


@pytest.mark.parametrize("name", REFUSED)
def test_sdpa_refuses_by_name(name: str) -> None:
    assert REFUSED[name](attention("reference")).abs().max() > 0.01
    with pytest.raises(NotImplementedError, match=r"flexnsa::.* has no .*derivative.*impl='reference'"):
        REFUSED[name](attention("sdpa"))


@pytest.mark.parametrize("name", ["v", "k", "k_cmp", "v_cmp", "k_win", "v_win"])
def test_no_tangent_is_dropped(name: str) -> None:
    value = getattr(X, name)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        func.jvp(lambda x: attend(X.replace(**{name: x}), impl="sdpa"), (value,), (torch.ones_like(value),))


def test_a_tangent_that_meets_no_operator_goes_through() -> None:
    def jvp(impl: str) -> Tensor:
        return func.jvp(lambda x: attend(X.replace(gates=x), impl=impl), (X.gates,), (X.gates.sin(),))[1]

    torch.testing.assert_close(jvp("sdpa"), jvp("reference"))


@pytest.mark.parametrize("name", GIVEN | REFUSED)
def test_sdpa_with_a_score_mod_gives_all(name: str) -> None:
    derive = (GIVEN | REFUSED)[name]
    got, want = (derive(attention(impl, score_mod=mods.soft_cap(2.0))) for impl in ("sdpa", "reference"))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", GIVEN)
def test_in_a_compiled_transform(name: str) -> None:
    f = attention("sdpa")
    compiled = torch.compile(lambda: GIVEN[name](f), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), GIVEN[name](attention("reference")))


@pytest.mark.parametrize("name", ["jvp", "jvp of grad", "grad of grad"])
def test_a_compiled_transform_refuses_too(name: str) -> None:
    f = attention("sdpa")
    with pytest.raises(Exception, match="derivative"):
        torch.compile(lambda: REFUSED[name](f), backend="aot_eager", fullgraph=True)()


@pytest.mark.usefixtures("eager_flex")
@torch.no_grad()
def test_flex_refuses_by_name_and_remembers_nothing() -> None:
    x = make_inputs(72, dtype=torch.float32)
    before = attend(x, impl="reference", branches=("win",))

    def run(q: Tensor) -> Tensor:
        return attend(x.replace(q=q), impl="flex", branches=("win",))

    with pytest.raises(NotImplementedError, match="impl='flex' works in no transform"):
        func.jvp(run, (x.q,), (x.q,))
    with pytest.raises(NotImplementedError, match="impl='flex' works in no transform"):
        func.vmap(run)(x.q[None])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="impl='flex' has no forward-mode"):
        run(forward_ad.make_dual(x.q, x.q))
    torch.testing.assert_close(run(x.q), before)


@pytest.mark.parametrize("cached", [False, True])
def test_a_layer(cached: bool) -> None:
    layer = NativeSparseAttention(16, 2, 1, 8, config=SMALL, impl="sdpa").double()
    x, tangent = torch.randn(2, 1, 40, 16, dtype=torch.float64)

    def run(x: Tensor) -> Tensor:
        if not cached:
            return layer(x)
        cache = layer.new_cache(1, 64)
        layer(x[:, :-1].detach(), cache=cache)
        return layer(x[:, -1:], cache=cache)

    with torch.no_grad(), pytest.raises(NotImplementedError, match="impl='reference'"):
        func.jvp(run, (x,), (tangent,))


@pytest.mark.parametrize("name", ["interval_attention", "selected_attention", "select_in_chunks", "selection_loss"])
def test_operators_of_named_tuples_do_what_their_schemas_say(name: str) -> None:
    x = make_inputs(40, dtype=torch.float32)
    token = torch.arange(40, dtype=torch.int32)[None]
    where, call = (token, torch.zeros_like(token), torch.zeros_like(token)), Call(SMALL, 0.3, mods.soft_cap(3.0))
    blocks = (token // SMALL.select_block_size)[:, None, :, None].expand(1, 2, -1, 1).contiguous()
    numbers = False, SMALL.to_ints(), SMALL.to_ints(), 0.3, 0.3, None, True
    inputs = {
        "interval_attention": IntervalInputs(x.q, x.k, x.v, where[1], token + 1, 0.3, 16),
        "selected_attention": SelectedInputs(x.q, x.k, x.v, blocks, *where[:2], 0.3, SMALL.select_block_size),
        "select_in_chunks": SelectionInputs.of(x.q, x.k_cmp, None, call),
        "selection_loss": SelectionLossInputs(x.q.detach(), x.k.detach(), x.q, x.k_cmp, *where, *where, *numbers),
    }
    torch.library.opcheck(getattr(torch.ops.flexnsa, name).default, tuple(inputs[name]))
