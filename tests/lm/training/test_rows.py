"""Which rows a step sees: cut from the text, or packed with whole documents that neither loss nor attention mixes."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.lm import TrainConfig
from flexnsa.lm.data.rows import Batch, PackedDocuments, Windows, document_bounds
from flexnsa.lm.training.trainer import draw_step

PARTS = [
    b"import os\n\n\n",
    b"def f():\n    return 1\n\n",
    b"    # more\n" + b"x" * 100 + b"\n\n",
    b"last\n\0",
    b"\n \n",
    b"one line\0",
    b"\0",
]
TEXT = b"".join(PARTS)


def test_documents_end_with_their_blank_lines_or_their_file() -> None:
    assert [TEXT[start:end] for start, end in document_bounds(TEXT)] == PARTS
    assert document_bounds(b"no end") == [(0, 6)]
    assert document_bounds(b"dos\r\n\r\nlines\n\n\0") == [(0, 7), (7, 15)]


@pytest.mark.parametrize("rows", [Windows, PackedDocuments])
def test_seed_and_step_alone_decide_what_a_step_learns_from(rows: type[Windows] | type[PackedDocuments]) -> None:
    source = rows(_tensor(TEXT * 20), 64)

    def drawn(seed: int, step: int) -> Batch:
        return draw_step(source, TrainConfig(seed=seed, batch_size=4), step)

    first = drawn(seed=0, step=3)
    assert first.tokens.shape == first.targets.shape == (4, 64)
    assert first.tokens.dtype == first.targets.dtype == torch.int64
    for other in (drawn(seed=0, step=4), drawn(seed=1, step=3)):
        assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(first.tokens, drawn(seed=0, step=3).tokens)
    assert torch.equal(source.spread(5).tokens, source.spread(5).tokens)


def test_windows_predict_the_next_byte_of_the_text() -> None:
    batch = Windows(_counting(1000), 16).draw(random.Random(0), 4)
    assert batch.document_ids is None
    assert (batch.tokens.diff(dim=1) % 256 == 1).all()
    assert torch.equal(batch.targets, (batch.tokens + 1) % 256)
    assert batch.num_targets() == 4 * 16


def test_spread_windows_reach_from_the_first_byte_to_the_last() -> None:
    batch = Windows(_counting(100), 9).spread(5)
    assert batch.tokens[0, 0] == 0
    assert batch.targets[-1, -1] == 99


@pytest.mark.parametrize("how", ["draw", "spread"])
def test_packed_rows_are_full_of_whole_documents(how: str) -> None:
    source = PackedDocuments(_tensor(TEXT), 64)
    batch = source.draw(random.Random(0), 50) if how == "draw" else source.spread(50)
    pieces = {piece for part in PARTS for piece in _cut(part, 64)}
    cut_short = 0
    for documents in _documents(batch):
        assert set(documents[:-1]) <= pieces
        assert any(piece.startswith(documents[-1]) for piece in pieces)
        cut_short += documents[-1] not in pieces
    assert 0 < cut_short < 50
    assert {len(documents) for documents in _documents(batch)} > {1, 3}


def test_every_document_is_drawn_as_often_as_any_other_and_spread_rows_keep_the_order() -> None:
    source = PackedDocuments(_tensor(b"a\n\nb\n\nc\n\nd\n\n"), 12)
    counts = torch.bincount(source.draw(random.Random(0), 1000).tokens.flatten())[list(b"abcd")]
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    assert [documents[0] for documents in _documents(source.spread(4))] == [b"a\n\n", b"b\n\n", b"c\n\n", b"d\n\n"]
    assert next(_documents(source.spread(1))) == [b"a\n\n", b"b\n\n", b"c\n\n", b"d\n\n"]


def test_targets_of_packed_rows_stay_in_their_document() -> None:
    batch = PackedDocuments(_tensor(TEXT), 64).draw(random.Random(0), 50)
    for tokens, targets, ids in zip(batch.tokens, batch.targets, given(batch.document_ids), strict=True):
        for (token, following), (own, next_own), target in zip(
            pairwise(tokens.tolist()), pairwise(ids.tolist()), targets.tolist(), strict=False
        ):
            assert 0 <= token < 256
            assert target == (following if own == next_own else -100)
        assert targets[-1] == -100
    assert batch.num_targets() == (batch.targets >= 0).sum()


def test_batches_split_into_rows() -> None:
    for batch in (Windows(_counting(100), 9).spread(5), PackedDocuments(_tensor(TEXT), 9).spread(5)):
        parts = batch.split(2)
        assert [len(part.tokens) for part in parts] == [2, 2, 1]
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
        ids = [part.document_ids for part in parts if part.document_ids is not None]
        assert batch.document_ids is None or torch.equal(torch.cat(ids), batch.document_ids)
        assert sum(part.num_targets() for part in parts) == batch.num_targets()


def test_rows_of_single_bytes_have_nothing_to_predict() -> None:
    assert (PackedDocuments(_tensor(b"\0" * 9), 4).spread(2).targets == -100).all()


def _documents(batch: Batch) -> Iterator[list[bytes]]:
    """The documents of each row, as bytes."""
    for tokens, ids in zip(batch.tokens, given(batch.document_ids), strict=True):
        lengths = torch.bincount(ids).tolist()
        yield [bytes(part.tolist()) for part in tokens.split(lengths)]


def _cut(part: bytes, length: int) -> list[bytes]:
    return [part[start : start + length] for start in range(0, len(part), length)]


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _counting(length: int) -> Tensor:
    return torch.arange(length).to(torch.uint8)
