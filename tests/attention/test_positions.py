"""Queries at positions of their own among the keys: their rows of the whole call, forward and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import native_sparse_attention
from flexnsa.attention.interface import given
from flexnsa.packing import document_ids_from_cu_seqlens
from tests.support.inputs import SMALL, Inputs, attend_with_aux, make_inputs

LENGTH = 333
JUMPS = torch.tensor([0, 3, 4, 5, 90, 91, 170, 171, 172, 173, 331, 332])
PLACES = {
    "the last ones": torch.arange(300, LENGTH),
    "two pieces, as on a rank": torch.cat([torch.arange(40, 81), torch.arange(250, 291)]),
    "jumps within a tile": JUMPS,
    "one": torch.tensor([117]),
    "the last alone": torch.tensor([LENGTH - 1]),  # is_causal=True would align its mask with the first key
    "every other one": torch.arange(1, LENGTH, 2),
    "of each row its own": torch.stack([JUMPS, torch.cat([torch.arange(7), torch.arange(200, 205)])]),
}
OF_QUERIES = ("q", "gates")
places = pytest.mark.parametrize("place", PLACES)


def at(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows ``tokens`` of ``x (B, H, S, D)``."""
    index = torch.atleast_2d(tokens)[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3])
    return x.gather(2, index)


def some_queries(x: Inputs, tokens: Tensor) -> Inputs:
    """All keys, and the queries at the tokens, as leaves."""
    return x.replace(q=at(x.q, tokens), gates=at(x.gates, tokens)).to(x.q.dtype)


def sink_by_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.01 * h


@places
@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_outputs_and_gradients_equal_those_of_all_queries(impl: str, place: str) -> None:
    tokens, x = PLACES[place], make_inputs(LENGTH, batch=2, value_dim=24).to(torch.float64)
    whole, aux = attend_with_aux(x, impl=impl)
    upstream = torch.randn_like(whole)
    other = some_queries(x, tokens)
    out, own = attend_with_aux(other, impl=impl, positions=tokens)
    torch.testing.assert_close(out, at(whole, tokens))
    assert torch.equal(given(own.block_indices), at(given(aux.block_indices), tokens))
    for got, of_all in ((own.out_cmp, aux.out_cmp), (own.out_slc, aux.out_slc), (own.out_win, aux.out_win)):
        torch.testing.assert_close(got, at(given(of_all), tokens))

    want = torch.autograd.grad(at(whole, tokens), list(x.named().values()), at(upstream, tokens))
    got = torch.autograd.grad(out, list(other.named().values()), at(upstream, tokens))
    for name, one, two in zip(x.named(), got, want, strict=True):
        torch.testing.assert_close(one, at(two, tokens) if name in OF_QUERIES else two)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_flex_on_cpu_equals_the_call_of_all_queries(branch: str) -> None:
    for length, tokens in (
        # Far apart: the keys of a tile of queries are then more tiles than those of neighbours would be.
        (2 * LENGTH, 2 * PLACES["of each row its own"]),
        (100, torch.arange(20, 84)),
    ):
        x = make_inputs(length, batch=2, dtype=torch.float32)
        ids = torch.bucketize(torch.arange(length), torch.tensor([10, 13, 70, 71]), right=True).expand(2, -1)
        options: dict[str, Any] = {"document_ids": ids, "branches": (branch,)}
        whole, aux = attend_with_aux(x, impl="sdpa", **options)
        queries = x.replace(q=at(x.q, tokens), gates=at(x.gates, tokens))
        out, own = attend_with_aux(queries, impl="flex", positions=tokens, **options)
        torch.testing.assert_close(out, at(whole, tokens))
        if branch == "slc":
            torch.testing.assert_close(own.block_indices, at(given(aux.block_indices), tokens))


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_documents_mods_and_given_blocks_go_with_positions(impl: str) -> None:
    x, tokens = make_inputs(LENGTH, batch=2), PLACES["jumps within a tile"]
    ids = document_ids_from_cu_seqlens(torch.tensor([0, 4, 57, 170, LENGTH]), LENGTH).expand(2, -1)
    options = {"document_ids": ids, "score_mod": sink_by_distance}
    whole, aux = attend_with_aux(x, impl=impl, **options)
    queries = x.replace(q=at(x.q, tokens), gates=at(x.gates, tokens))
    out, own = attend_with_aux(queries, impl=impl, positions=tokens, **options)
    torch.testing.assert_close(out, at(whole, tokens))
    again, _ = attend_with_aux(queries, impl=impl, positions=tokens, block_indices=own.block_indices, **options)
    torch.testing.assert_close(again, out)
    assert torch.equal(given(own.block_indices), at(given(aux.block_indices), tokens))


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_one_branch_alone_takes_positions(branch: str) -> None:
    x, tokens = make_inputs(LENGTH), PLACES["two pieces, as on a rank"]
    unread = {name: None for name in ("k", "v") if branch != "slc"}
    unread |= {name: None for name in ("k_win", "v_win") if branch != "win"}
    named = x.named() | {"k": x.k, "v": x.v} | unread
    options = {"config": SMALL, "branches": (branch,)}
    whole = native_sparse_attention(**named, **options)
    queries = {"q": at(x.q, tokens), "gates": at(x.gates, tokens)}
    out = native_sparse_attention(**(named | queries), positions=tokens, **options)
    torch.testing.assert_close(out, at(whole, tokens))


WRONG = {
    "equal": ([3, 3, 4], "expected tokens that increase, got 3 before 3 at query 0 of row 0"),
    "falling": ([[1, 2, 3], [5, 7, 6]], "expected tokens that increase, got 7 before 6 at query 1 of row 1"),
    "behind the last key": ([1, 2, LENGTH], f"expected 0 .. {LENGTH - 1}, got {LENGTH} at query 2 of row 0"),
    "negative": ([-1, 2, 3], f"expected 0 .. {LENGTH - 1}, got -1 at query 0 of row 0"),
    "too few": ([1, 2], r"expected shape \(3,\), got \(2,\)"),
    "too many rows": ([[1, 2, 3]] * 3, r"expected shape \(2, 3\), got \(3, 3\)"),
    "floating": ([1.0, 2.0, 3.0], "expected dtype torch.int32 or torch.int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_queries_can_stand_at_is_refused(case: str) -> None:
    values, message = WRONG[case]
    x = make_inputs(LENGTH, batch=2)
    queries = x.replace(q=x.q[:, :, :3], gates=x.gates[:, :, :3])
    with pytest.raises(ValueError, match=f"^positions: {message}"):
        attend_with_aux(queries, positions=torch.tensor(values))


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 2])
def test_document_ids_give_the_number_of_tokens(length: int) -> None:
    x, tokens = make_inputs(length, dtype=torch.float32), torch.tensor([3, 150, length - 1])
    ids = document_ids_from_cu_seqlens(torch.tensor([0, 101, length]))
    whole, _ = attend_with_aux(x, branches=("cmp",), document_ids=ids)
    out, _ = attend_with_aux(some_queries(x, tokens), branches=("cmp",), document_ids=ids, positions=tokens)
    torch.testing.assert_close(out, at(whole, tokens))
