"""What holds for every implementation in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_type

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa import NativeSparseAttention
from flexnsa.attention.dispatch import (
    CACHED_IMPLEMENTATIONS,
    IMPLEMENTATIONS,
    REFERENCE,
    attend,
    by_branch,
    choose_implementation,
)
from flexnsa.attention.flex import cached as flex_cached
from flexnsa.attention.interface import Call, Implementation, Keys, NSAAux, given
from flexnsa.attention.plan import GATHERED_QUERIES, OWN_KEYS_QUERIES
from flexnsa.attention.triton import intervals as triton_intervals
from flexnsa.attention.triton import selected as triton_selected
from flexnsa.functional import native_sparse_attention
from flexnsa.layers import forward
from flexnsa.masks.positions import Positions
from flexnsa.masks.user_mods import cap_of
from flexnsa.mods import ScoreMod, soft_cap
from tests.support.inputs import SMALL, Inputs, make_inputs
from tests.support.inputs import attend as attend_with

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])
CAP, OTHER = soft_cap(3.0), soft_cap(torch.tensor(3.0))
BRANCH_FUNCTIONS = ("compressed", "select", "selected", "window")


@pytest.mark.parametrize("count", [1, 3, GATHERED_QUERIES, GATHERED_QUERIES + 1])
@impls
def test_a_cached_step_never_returns_importance_as_lse(impl: str, count: int) -> None:
    """For few queries sdpa has no lse: it scores the blocks in passing, and that is nobody's ``lse_cmp``."""
    length = 75
    x = make_inputs(length, batch=2)
    last = Positions.of_sequence(length).at(slice(length - count, None))
    call = Call(SMALL, 0.25, positions=last, window_positions=last)
    keys = Keys(x.k_cmp, x.v_cmp, x.k, x.v, x.k_win, x.v_win)
    q, gates = x.q[:, :, -count:], by_branch(x.gates[:, :, -count:])

    out, aux = attend(CACHED_IMPLEMENTATIONS[impl], q, keys, gates, call)
    exact, exact_aux = attend(REFERENCE, q, keys, gates, call)

    torch.testing.assert_close(out, exact)
    assert torch.equal(given(aux.block_indices), given(exact_aux.block_indices))
    if impl == "sdpa" and count <= GATHERED_QUERIES:
        assert aux.lse_cmp is None
    else:
        torch.testing.assert_close(aux.lse_cmp, exact_aux.lse_cmp)


def test_what_comes_back_is_known_before_the_call() -> None:
    """A type checker reads this file too."""
    x = make_inputs(20)
    assert_type(native_sparse_attention(x.q, x.k, x.v, x.gates, k_cmp=x.k_cmp, v_cmp=x.v_cmp, config=SMALL), Tensor)
    out, aux = native_sparse_attention(
        x.q, x.k, x.v, x.gates, k_cmp=x.k_cmp, v_cmp=x.v_cmp, config=SMALL, return_aux=True
    )
    assert assert_type(out, Tensor).shape == x.q.shape
    assert isinstance(assert_type(aux, NSAAux), NSAAux)


@pytest.mark.parametrize("known", [False, True])
def test_an_implementation_is_asked_for_the_gated_sum_where_no_gate_is_negative(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Call] = []
    monkeypatch.setitem(
        IMPLEMENTATIONS, "sdpa", replace(IMPLEMENTATIONS["sdpa"], gated_sum=lambda *x: asked.append(x[-1]))
    )
    x = make_inputs(20)
    inputs: dict[str, Any] = {"q": x.q, "k": x.k, "v": x.v, "gates": x.gates, "k_cmp": x.k_cmp, "v_cmp": x.v_cmp}
    out = native_sparse_attention(**inputs, config=SMALL, nonnegative_gates=known)
    assert len(asked) == known
    torch.testing.assert_close(out, native_sparse_attention(**inputs, config=SMALL, impl="reference"))


def test_every_implementation_has_a_cached_form() -> None:
    assert IMPLEMENTATIONS.keys() == CACHED_IMPLEMENTATIONS.keys()


@pytest.mark.parametrize(("dims", "chosen"), [((64, 64), "triton"), ((320, 64), "flex"), ((64, 320), "flex")])
def test_auto_of_a_layer_depends_on_the_dimensions_of_its_heads(
    dims: tuple[int, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_on_cuda(impl: str, x: Tensor, **options: Any) -> Implementation:
        with FakeTensorMode():
            assert (
                choose_implementation(impl, torch.empty(x.shape, device="cuda"), **options) is IMPLEMENTATIONS[chosen]
            )
        return IMPLEMENTATIONS["sdpa"]

    monkeypatch.setattr(forward, "choose_implementation", choose_on_cuda)
    layer = NativeSparseAttention(64, 4, 2, dims[0], v_head_dim=dims[1], config=SMALL)
    assert layer(torch.randn(1, 40, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("device", "dim", "mod", "chosen"),
    [
        *(("cpu", 64, mod, "sdpa") for mod in (None, CAP, OTHER)),
        *(("cuda", dim, mod, "triton") for dim in (64, 256) for mod in (None, CAP)),
        ("cuda", 64, OTHER, "flex"),
        ("cuda", 257, None, "flex"),
    ],
)
def test_auto_takes_what_can_do_what_was_asked(device: str, dim: int, mod: ScoreMod | None, chosen: str) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, dim, device=device)
    modded = cap_of(mod) is None
    assert choose_implementation("auto", q, modded=modded) is IMPLEMENTATIONS[chosen]
    assert choose_implementation("auto", q, modded=modded, cached=True) is CACHED_IMPLEMENTATIONS[chosen]


@pytest.mark.parametrize(
    ("count", "dim", "mod", "chosen"),
    [
        (OWN_KEYS_QUERIES, 64, None, "flex"),
        (OWN_KEYS_QUERIES + 1, 64, CAP, "triton"),
        (OWN_KEYS_QUERIES + 1, 512, None, "flex"),
        (OWN_KEYS_QUERIES + 1, 64, OTHER, "flex"),
    ],
)
def test_many_cached_queries_use_the_kernels_of_whole_sequences(
    count: int, dim: int, mod: ScoreMod | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name, modules in (("flex", (flex_cached, flex_cached)), ("triton", (triton_selected, triton_intervals))):
        for module, branch in zip((*modules, modules[1]), ("selected", "window", "compressed"), strict=True):
            monkeypatch.setattr(module, branch, lambda *_, name=name: called.append(name))
    call = Call(SMALL, 0.25, mod)
    with FakeTensorMode():
        q, k = torch.empty(2, 4, count, dim, device="cuda"), torch.empty(2, 2, 200, dim, device="cuda")
        blocks = torch.empty(2, 2, count, 4, dtype=torch.int32, device="cuda")
        CACHED_IMPLEMENTATIONS["triton"].selected(q, k, k, blocks, call)
        CACHED_IMPLEMENTATIONS["triton"].window(q, k, k, call)
        CACHED_IMPLEMENTATIONS["triton"].compressed(q, k, k, call)
    assert called == [chosen] * 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which functions of which implementation run."""
    record: list[str] = []

    def spied(implementation: Implementation, impl: str, name: str) -> Callable[..., Any]:
        def spy(*args: object) -> object:
            record.append(f"{impl}.{name}")
            return getattr(implementation, name)(*args)

        return spy

    for impl, implementation in list(IMPLEMENTATIONS.items()):
        spies = {name: spied(implementation, impl, name) for name in BRANCH_FUNCTIONS}
        monkeypatch.setitem(IMPLEMENTATIONS, impl, replace(implementation, **spies))
    return record


@impls
def test_the_layer_hands_its_implementation_on(impl: str, calls: list[str]) -> None:
    NativeSparseAttention(16, 2, 1, 8, config=SMALL, impl=impl)(torch.randn(1, 40, 16))
    assert {call.split(".")[0] for call in calls} == {impl}


@impls
@pytest.mark.parametrize(
    ("branches", "functions"),
    [
        (("cmp",), ("compressed",)),
        (("slc",), ("select", "selected")),
        (("win",), ("window",)),
        (("cmp", "win"), ("compressed", "window")),
    ],
)
def test_one_branch_costs_one_branch(
    impl: str, branches: tuple[str, ...], functions: tuple[str, ...], calls: list[str]
) -> None:
    """Isolation that computed all three branches and multiplied two by 0."""
    x = make_inputs(40)
    needs = {"cmp": ("k_cmp", "v_cmp"), "slc": ("k", "v", "k_cmp"), "win": ("k_win", "v_win")}
    used = {"q", "gates", *(name for branch in branches for name in needs[branch])}
    poisoned = {n: t if n in used else torch.full_like(t, torch.nan) for n, t in x.named().items()}
    out = attend_with(Inputs(**poisoned), branches=branches, impl=impl)
    assert calls == [f"{impl}.{function}" for function in functions]
    assert out.isfinite().all()
