"""Branches that are run again in backward: what is saved falls by what they give, and no number changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.harness.memory import saved_for_backward
from flexnsa import NativeSparseAttention, native_sparse_attention
from flexnsa.attention import dispatch as implementations
from flexnsa.config import BRANCHES
from flexnsa.mods import soft_cap
from tests.support import triton_branches
from tests.support.compiled import PARTITIONED
from tests.support.inputs import SMALL, Inputs, attend, make_inputs
from tests.support.interpreter import Interpret

CHOICES = [tags for count in (1, 2, 3) for tags in combinations(BRANCHES, count)]
FUNCTIONS = {"cmp": "compressed", "slc": "selected", "win": "window"}
DOCUMENTS = torch.tensor([[0] * 33 + [1] * 67, [0] * 71 + [4] * 29])
SITUATIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "documents": {"document_ids": DOCUMENTS},
    "mod": {"score_mod": soft_cap(2.0), "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 != 3},  # noqa: ARG005
    "oracle": {"impl": "reference"},
}


def inputs(seq_len: int = 100) -> Inputs:
    return make_inputs(seq_len, batch=2, group=3, value_dim=24).to(torch.float32)


def results(x: Inputs, call: Callable[..., Tensor] = attend, **options: Any) -> list[Tensor]:
    out = call(x, **options)
    return [out, *torch.autograd.grad(out.square().sum(), list(x.named().values()))]


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mock]:
    """Have the functions of ``impl="sdpa"`` count their calls."""
    chosen = implementations.IMPLEMENTATIONS["sdpa"]
    counted = {name: Mock(wraps=getattr(chosen, name)) for name in (*FUNCTIONS.values(), "select")}
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "sdpa", replace(chosen, **counted))
    return counted


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("recompute", CHOICES, ids=" ".join)
def test_no_bit_of_output_or_gradients_changes(recompute: tuple[str, ...], situation: str) -> None:
    x = inputs()
    options = SITUATIONS[situation]
    pairs = zip(results(x, **options), results(x, recompute=recompute, **options), strict=True)
    assert all(torch.equal(plain, again) for plain, again in pairs)


@pytest.mark.parametrize("recompute", [(), *CHOICES], ids=" ".join)
def test_named_branches_run_twice_all_else_once(recompute: tuple[str, ...], functions: dict[str, Mock]) -> None:
    results(inputs(), recompute=recompute)
    runs = {name: function.call_count for name, function in functions.items()}
    assert runs == {"select": 1} | {FUNCTIONS[tag]: 1 + (tag in recompute) for tag in BRANCHES}


@pytest.mark.parametrize("recompute", CHOICES, ids=" ".join)
def test_saved_bytes_fall_by_what_the_branches_give(recompute: tuple[str, ...]) -> None:
    x = inputs()
    saved = {}
    for tags in ((), recompute):
        with saved_for_backward(list(x.named().values())) as held:
            _out = attend(x, recompute=tags)
        saved[tags] = held.total
    rows = x.q.shape[:3].numel()
    given = 4 * rows * (x.v.shape[-1] + 1)  # output and log-sum-exp, fp32
    tokens = 8 * x.q.shape[2]  # and where each query stands
    assert saved[()] - saved[recompute] == len(recompute) * (given + tokens)
    if recompute == BRANCHES:
        assert saved[recompute] == 4 * 2 * rows / 6 * SMALL.num_selected_blocks, "more than the selection is saved"


def test_what_branches_give_beside_the_sum_is_differentiable() -> None:
    x = inputs()

    def auxiliary(recompute: tuple[str, ...]) -> list[Tensor]:
        out, aux = native_sparse_attention(**x.named(), config=SMALL, return_aux=True, recompute=recompute)
        seen = aux.lse_cmp
        terms = [out, aux.out_cmp, aux.out_slc, aux.out_win, seen.masked_fill(seen == -torch.inf, 0)]
        loss = sum(number * term.square().sum() for number, term in enumerate(terms, 1) if term is not None)
        return list(torch.autograd.grad(loss, list(x.named().values())))  # pyright: ignore[reportCallIssue, reportArgumentType]

    assert all(map(torch.equal, auxiliary(()), auxiliary(BRANCHES)))


def test_packed_sequences_of_any_length_use_one_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=PARTITIONED)
    for seq_len in (108, 77, 130):
        x, ids = inputs(seq_len), torch.arange(seq_len).div(41, rounding_mode="floor").expand(2, -1)
        again = results(x, compiled, recompute=BRANCHES, document_ids=ids)
        pairs = zip(results(x, document_ids=ids), again, strict=True)
        assert all(torch.equal(plain, again) for plain, again in pairs)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("call", ["triton eager", "triton compiled", "triton checkpointed", "sdpa compiled"])
def test_a_layer_keeps_fewer_outputs_and_has_the_same_gradients(call: str, interpret: Interpret) -> None:
    got = interpret(triton_branches, f"recompute {call}")
    assert got["same"]
    assert got["fewer"] == ([0, 0] if "checkpointed" in call else [1, 2])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (("all",), ValueError, r"^recompute: expected some of \('cmp', 'slc', 'win'\), each once, or none, got"),
        (("win", "win"), ValueError, r"^recompute: expected .* each once"),
        ("win", ValueError, r"^recompute: expected .* got 'win'"),
        ({"win"}, TypeError, r"^recompute: expected a sequence"),
        (True, TypeError, r"^recompute: expected a sequence"),
    ],
)
def test_wrong_choices_are_named(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attend(inputs(), recompute=wrong)
    with pytest.raises(error, match=message):
        NativeSparseAttention(32, 6, 2, 8, recompute=wrong)


def test_a_missing_branch_cannot_be_recomputed() -> None:
    with pytest.raises(ValueError, match=r"^recompute: expected some of \('cmp', 'slc'\), .* got \('win',\)"):
        attend(inputs(), branches=("cmp", "slc"), recompute=("win",))
