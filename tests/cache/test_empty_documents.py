"""A document without tokens among packed prompts leaves its row of a cache as empty as a length of 0 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from flexnsa.packing import document_ids_from_cu_seqlens, pack_padded
from tests.lm.model.sessions import make_model, prompts

LENGTHS = [[4, 0, 5], [0, 4, 5], [0, 0, 9], [4, 0, 0, 12], [20, 0, 1, 0, 13], [7, 2]]


def by_cu_seqlens(lengths: list[int]) -> Tensor:
    return document_ids_from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0))


def by_padding(lengths: list[int]) -> Tensor:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return pack_padded(mask, mask)[1].long()


def packed(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])[None]


def assert_same_caches(got: list[Any], want: list[Any]) -> None:
    """All that later steps read is the same: lengths, and what the buffers hold of the tokens."""
    for one, other in zip(got, want, strict=True):
        assert one.lengths.tolist() == other.lengths.tolist()
        for name, count in one.counts().items():
            assert_close(count, other.counts()[name])


@torch.no_grad()
@pytest.mark.parametrize("ids", [by_cu_seqlens, by_padding])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_takes_an_empty_document_as_length_0(
    attention: str, lengths: list[int], ids: Callable[[list[int]], Tensor]
) -> None:
    model, x, count = make_model(attention), prompts(len(lengths), 20), len(lengths)
    together, apart = model.new_caches(count, 40), model.new_caches(count, 40)
    logits = model(packed(x, lengths), document_ids=ids(lengths), caches=together)
    padded = model(x, caches=apart, lengths=torch.tensor(lengths))
    assert_close(logits[0], packed(padded, lengths)[0])
    assert_same_caches(together, apart)
    for _ in range(3):
        assert_close(model(x[:, :1], caches=together), model(x[:, :1], caches=apart))
    assert_same_caches(together, apart)


@torch.no_grad()
@pytest.mark.parametrize(
    ("ids", "rows", "got"),
    [
        ([0, 0, 1, 1], 3, "2, and none for row 2"),  # nothing tells of a document behind the last token
        ([1, 1, 3, 3], 3, "2, and none for row 2"),
        ([-1, -1, 2, 2], 3, "2, and none for row 2"),
        ([0, 0, 1, 2], 2, "3"),
        ([0, 0, 5, 9], 2, "3"),
    ],
)
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_unequal_numbers_of_documents_and_sequences_raise(attention: str, ids: list[int], rows: int, got: str) -> None:
    model = make_model(attention)
    caches = model.new_caches(rows, 40)
    message = f"^document_ids: expected {rows} documents, one for each row of the cache, got {got}$"
    with pytest.raises(ValueError, match=message):
        model(prompts(1, 4), document_ids=torch.tensor([ids]), caches=caches)
    assert not any(tensor.any() for cache in caches for tensor in cache.state().values())


@torch.no_grad()
@pytest.mark.parametrize("ids", [[3, 3, 7, 7], [0, 0, 2, 2], [-5, -5, 1, 1]])
def test_as_many_documents_as_sequences_keep_their_order(ids: list[int]) -> None:
    model = make_model()
    caches = model.new_caches(2, 40)
    model(prompts(1, 4), document_ids=torch.tensor([ids]), caches=caches)
    assert caches[0].lengths.tolist() == [2, 2]
