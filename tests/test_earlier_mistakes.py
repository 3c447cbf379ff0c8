"""Mistakes made in earlier implementations of Native Sparse Attention, each with the test that would have caught it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexnsa import NativeSparseAttention, select_blocks, sliding_window_attention
from flexnsa.attention.dispatch import IMPLEMENTATIONS
from flexnsa.attention.interface import Call, Implementation
from flexnsa.geometry import num_compressed
from flexnsa.positions import Positions
from tests.support.inputs import SMALL, Inputs, attend, make_inputs

BRANCH_FUNCTIONS = ("compressed", "select", "selected", "window")

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])


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
def test_one_query_at_the_end_attends_to_more_than_the_first_key(impl: str) -> None:
    """``is_causal=True`` aligns its mask at the top left: a single query then saw key 0 only."""
    x, implementation, seq_len = make_inputs(77), IMPLEMENTATIONS[impl], 77
    last = Positions.of_sequence(seq_len).at(slice(seq_len - 1, None))
    all_queries, last_query = Call(SMALL, 0.25), Call(SMALL, 0.25, positions=last, window_positions=last)
    blocks = implementation.select(x.q, x.k_cmp, all_queries, None, None)
    last_q, last_blocks = x.q[:, :, -1:], blocks[:, :, -1:].contiguous()

    assert torch.equal(implementation.select(last_q, x.k_cmp, last_query, None, None), last_blocks)
    for of_last, of_all in (
        (
            implementation.compressed(last_q, x.k_cmp, x.v_cmp, last_query),
            implementation.compressed(x.q, x.k_cmp, x.v_cmp, all_queries),
        ),
        (
            implementation.selected(last_q, x.k, x.v, last_blocks, last_query),
            implementation.selected(x.q, x.k, x.v, blocks, all_queries),
        ),
        (
            implementation.window(last_q, x.k_win, x.v_win, last_query),
            implementation.window(x.q, x.k_win, x.v_win, all_queries),
        ),
    ):
        assert of_last.lse is not None
        assert of_all.lse is not None
        torch.testing.assert_close(of_last.out, of_all.out[:, :, -1:])
        torch.testing.assert_close(of_last.lse, of_all.lse[:, :, -1:])


@impls
@pytest.mark.parametrize("seq_len", [25, 2 * 24 + 1, 3 * 24 + 5])
def test_window_beyond_its_size_reads_neither_the_future_nor_nothing(impl: str, seq_len: int) -> None:
    """A window indexed after truncation: early tokens read the future and late ones nothing.

    Values are their own positions and keys are equal, so the output is the mean position of what was read.
    """
    q, k = torch.zeros(1, 2, seq_len, 16), torch.zeros(1, 1, seq_len, 16)
    v = torch.arange(seq_len, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 1, -1, 8)
    out, lse = sliding_window_attention(q, k, v, config=SMALL, impl=impl)
    for t in range(seq_len):
        first = max(0, t - SMALL.window_size + 1)
        torch.testing.assert_close(out[0, :, t], torch.full((2, 8), (first + t) / 2))
        torch.testing.assert_close(lse[0, :, t], torch.full((2,), float(t - first + 1)).log())


@impls
def test_selection_does_not_see_future_compressed_tokens(impl: str) -> None:
    """A softmax over all compressed tokens let the future into the scores; a prefix then selected other blocks."""
    x = make_inputs(150)
    whole = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
    for length in (17, 64, 100, 149):
        prefix = select_blocks(
            x.q[:, :, :length], x.k_cmp[:, :, : num_compressed(length, SMALL)], config=SMALL, impl=impl
        )
        assert torch.equal(prefix, whole[:, :, :length])
    loud = x.k_cmp.clone()
    loud[:, :, num_compressed(100, SMALL) :] *= 1e4  # would swallow the whole softmax
    assert torch.equal(select_blocks(x.q, loud, config=SMALL, impl=impl)[:, :, :100], whole[:, :, :100])


@impls
def test_the_choice_of_implementation_is_read(impl: str, calls: list[str]) -> None:
    """Flags that nothing read: "all backends use identical memory"."""
    attend(make_inputs(40), impl=impl)
    assert sorted(calls) == sorted(f"{impl}.{function}" for function in BRANCH_FUNCTIONS)


@impls
def test_the_layer_hands_its_implementation_on(impl: str, calls: list[str]) -> None:
    NativeSparseAttention(16, 2, 1, 8, config=SMALL, impl=impl)(torch.randn(1, 40, 16))
    assert {call.split(".")[0] for call in calls} == {impl}


def test_auto_is_sdpa_on_a_cpu(calls: list[str]) -> None:
    attend(make_inputs(40))
    assert {call.split(".")[0] for call in calls} == {"sdpa"}


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
    out = attend(Inputs(**poisoned), branches=branches, impl=impl)
    assert calls == [f"{impl}.{function}" for function in functions]
    assert out.isfinite().all()


@impls
@pytest.mark.parametrize("branches", [("cmp",), ("slc",), ("win",), ("cmp", "win"), ("win", "slc", "cmp")])
def test_branches_left_out_are_those_with_a_shut_gate(impl: str, branches: tuple[str, ...]) -> None:
    x = make_inputs(77)
    keep = torch.tensor([branch in branches for branch in ("cmp", "slc", "win")])
    alone = attend(x, branches=branches, impl=impl)
    shut = x.replace(gates=x.gates * keep)
    torch.testing.assert_close(alone, attend(shut, impl=impl))
