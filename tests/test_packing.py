"""The four ways to say where documents are: each leads to every other, and wrong ones are named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa import (
    cu_seqlens_from_document_ids,
    document_ids_from_attention_mask,
    document_ids_from_cu_seqlens,
    document_ids_from_position_ids,
    next_token_targets,
    pack_padded,
    position_ids_from_document_ids,
    unpack_padded,
)


def random_lengths(draws: random.Random) -> list[int]:
    return [draws.choice([1, 1, 2, 3, 10, 50]) for _ in range(draws.randint(1, 12))]


@pytest.mark.parametrize("seed", range(20))
def test_every_description_leads_to_every_other(seed: int) -> None:
    lengths = random_lengths(random.Random(seed))
    ids = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    assert torch.equal(document_ids_from_cu_seqlens(cu_seqlens), ids)
    assert torch.equal(document_ids_from_cu_seqlens(cu_seqlens.int(), sum(lengths)), ids)
    assert torch.equal(document_ids_from_position_ids(positions), ids)
    assert torch.equal(cu_seqlens_from_document_ids(ids), cu_seqlens)
    assert torch.equal(position_ids_from_document_ids(ids), positions)
    padded, mask = right_padded(lengths, torch.arange(sum(lengths)))
    packed, packed_ids = pack_padded(padded, mask)
    assert torch.equal(packed[0], torch.arange(sum(lengths)))
    assert torch.equal(packed_ids, ids)
    assert torch.equal(unpack_padded(packed, mask), padded)


def right_padded(lengths: list[int], tokens: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.nn.utils.rnn.pad_sequence(list(tokens.split(lengths)), batch_first=True)
    return padded, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_all_but_tensors_of_booleans_are_int32() -> None:
    ids = torch.tensor([[0, 0, 1]])
    made = (
        document_ids_from_cu_seqlens(torch.tensor([0, 2, 3])),
        document_ids_from_position_ids(torch.tensor([[0, 1, 0]])),
        document_ids_from_attention_mask(torch.tensor([[1, 1, 0]])),
        pack_padded(ids, torch.tensor([[1, 1, 0]]))[1],
        cu_seqlens_from_document_ids(ids),
        position_ids_from_document_ids(ids),
    )
    assert {x.dtype for x in made} == {torch.int32}


def test_ids_may_begin_anywhere_skip_numbers_and_differ_between_rows() -> None:
    ids = torch.tensor([[3, 3, 7, 7], [-1, 5, 5, 5]])
    assert position_ids_from_document_ids(ids).tolist() == [[0, 1, 0, 1], [0, 0, 1, 2]]
    assert cu_seqlens_from_document_ids(ids).tolist() == [0, 2, 4, 5, 8]


def test_a_row_begins_a_document_even_where_its_id_is_that_of_the_row_before() -> None:
    assert cu_seqlens_from_document_ids(torch.zeros(2, 3, dtype=torch.int32)).tolist() == [0, 3, 6]


def test_empty_documents_and_a_list_filled_up_with_its_end() -> None:
    assert document_ids_from_cu_seqlens(torch.tensor([0, 2, 2, 3, 3, 3])).tolist() == [[0, 0, 2]]


def test_padding_on_any_side_is_packed_away_and_comes_back_as_zeros() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    x = torch.randn(5, 4, 3, requires_grad=True)
    packed, ids = pack_padded(x, mask)
    assert ids.tolist() == [[0, 0, 1, 2, 2, 4, 4, 4, 4]]
    assert torch.equal(packed[0, 2], x[1, 3])
    unpacked = unpack_padded(packed, mask)
    assert torch.equal(unpacked, x * mask[..., None])
    seed = torch.randn_like(x)
    (grad,) = torch.autograd.grad(unpacked, x, seed)
    assert torch.equal(grad, seed * mask[..., None])


def test_padding_becomes_documents_of_its_own() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    ids = document_ids_from_attention_mask(mask)
    assert ids.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_targets_never_cross_a_boundary() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]], dtype=torch.int32)
    ids = torch.tensor([[0, 0, 0, 1, 2], [4, 4, 5, 5, 5]])
    targets = next_token_targets(tokens, ids)
    assert targets.tolist() == [[11, 12, -100, -100, -100], [21, -100, 23, 24, -100]]
    logits = torch.zeros(10, 32)
    assert F.cross_entropy(logits, targets.flatten(), reduction="sum").item() == pytest.approx(
        5 * torch.tensor(32.0).log().item()
    )


STATIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cu_seqlens to ids": lambda ids, _: document_ids_from_cu_seqlens(ids[0].cumsum(0) - ids[0, 0], int(ids.sum())),
    "ids to positions to ids": lambda ids, _: document_ids_from_position_ids(position_ids_from_document_ids(ids)),
    "mask to ids": lambda _, mask: document_ids_from_attention_mask(mask),
    "unpack": lambda ids, mask: unpack_padded(ids.view(1, -1), mask),
    "targets": lambda ids, _: next_token_targets(ids, ids),
}


@pytest.mark.parametrize("name", STATIC)
def test_what_need_not_synchronise_compiles_whole(name: str) -> None:
    """A graph without a break on fake tensors reads no value: none waits for an accelerator."""
    ids, mask = torch.tensor([[0, 0, 1, 1, 1, 3]]), torch.ones(2, 3, dtype=torch.bool)
    compiled = torch.compile(STATIC[name], backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, mask), STATIC[name](ids, mask))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: document_ids_from_cu_seqlens(torch.tensor([1, 2])), r"cu_seqlens: expected to start at 0, got 1"),
        (lambda: document_ids_from_cu_seqlens(torch.tensor([0, 5, 3])), r"cu_seqlens: .* got 3 at \[2\]"),
        (
            lambda: document_ids_from_cu_seqlens(torch.tensor([0, 5]), 6),
            r"cu_seqlens: expected to end at seq_len=6, got 5",
        ),
        (lambda: document_ids_from_cu_seqlens(torch.tensor([0.0, 5.0])), r"cu_seqlens: .* got torch.float32"),
        (lambda: document_ids_from_cu_seqlens(torch.tensor([[0, 5]])), r"cu_seqlens: expected shape .* got \(1, 2\)"),
        (lambda: document_ids_from_cu_seqlens(torch.tensor([], dtype=torch.int32)), r"cu_seqlens: .* got no entry"),
        (lambda: document_ids_from_position_ids(torch.tensor([[1, 2]])), r"position_ids: .* got 1 at \[0, 0\]"),
        (lambda: document_ids_from_position_ids(torch.tensor([[0, 1, 3]])), r"position_ids: .* got 3 at \[0, 2\]"),
        (lambda: position_ids_from_document_ids(torch.tensor([[0, 2, 1]])), r"document_ids: .* got 2 before 1"),
        (lambda: cu_seqlens_from_document_ids(torch.tensor([0, 1])), r"document_ids: expected shape \(B, S\)"),
        (lambda: next_token_targets(torch.zeros(1, 3).long(), torch.zeros(1, 2).long()), r"tokens: expected shape"),
        (lambda: document_ids_from_attention_mask(torch.tensor([[1, 0, 1]])), r"attention_mask: .* got 1 at \[0, 2\]"),
        (lambda: document_ids_from_attention_mask(torch.tensor([[2, 0]])), r"attention_mask: .* got 2 at \[0, 0\]"),
        (lambda: document_ids_from_attention_mask(torch.ones(1, 2)), r"attention_mask: expected dtype bool, int32"),
        (lambda: pack_padded(torch.ones(2, 3), torch.ones(2, 4).bool()), r"x: expected a tensor \(2, 4\)"),
        (lambda: unpack_padded(torch.ones(2, 3), torch.ones(2, 3).bool()), r"packed: expected a tensor \(1, T"),
        (lambda: unpack_padded(torch.ones(1, 3), torch.ones(2, 3).bool()), r"packed: expected the 6 tokens .* got 3"),
    ],
)
def test_wrong_descriptions_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        call()


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"^cu_seqlens: expected a tensor \(D \+ 1,\), got \[0, 3\]"):
        document_ids_from_cu_seqlens([0, 3])  # pyright: ignore[reportArgumentType]
    mask, rows = torch.ones(1, 2, dtype=torch.bool), cast("torch.Tensor", [[1, 2]])
    with pytest.raises(TypeError, match=r"^x: expected Tensor, got \[\[1, 2\]\]"):
        pack_padded(rows, mask)
    with pytest.raises(TypeError, match=r"^packed: expected Tensor, got \[\[1, 2\]\]"):
        unpack_padded(rows, mask)
