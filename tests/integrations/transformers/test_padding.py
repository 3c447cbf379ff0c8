"""What masks, positions and offsets tell of tokens, as ``Rows.of`` reads them: padding, documents, contradictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.transformers.mask_functions import NEW, VALID, make_padding_mask
from flexnsa.transformers.padding import Gaps, Rows

LENGTH = 20
STEPS = torch.arange(LENGTH)
IMAGE = torch.stack((torch.zeros(8), torch.arange(8) // 4, torch.arange(8) % 4)).long() + 6
FILM = torch.stack((torch.arange(8) // 2, torch.zeros(8), torch.arange(8) % 2)).long() + 6
"""Positions on the axes of time, height and width. Behind a film, the axis of time falls."""
POSITIONS = {
    "none": None,
    "gap": torch.where(STEPS < 12, STEPS, STEPS + 9),
    "halved": STEPS // 2,
    "offset": STEPS + 7,
    "restarting": torch.cat((STEPS[:12], STEPS[:8])),
}
NOTHING_PADDED = torch.full((2, 1, 1, LENGTH), VALID | NEW, dtype=torch.int8)
MASK = torch.ones(3, LENGTH, dtype=torch.bool)
MASK[1, :7], MASK[2, 15:] = False, False


def padded(seen: int = 0, lengths: Tensor = MASK) -> Tensor | None:
    return make_padding_mask(3, LENGTH - seen, LENGTH, seen, attention_mask=lengths)


def starts(rows: Rows) -> list[list[int]]:
    """Give where documents start, for each row."""
    assert rows.documents is not None
    return [(row.diff().nonzero()[:, 0] + 1).tolist() for row in rows.documents]


@pytest.mark.parametrize("mask", [None, NOTHING_PADDED], ids=["no mask", "nothing padded"])
@pytest.mark.parametrize("gaps", ["keep", "cut", "refuse"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_tell_of_documents(kind: str, gaps: Gaps, mask: Tensor | None) -> None:
    positions = POSITIONS[kind]
    expected = {"restarting": [12], "gap": [12], "halved": [*range(1, LENGTH, 2)]}.get(kind, [])
    shape = 2, LENGTH, LENGTH
    called: list[Any] = [mask, None if positions is None else positions[None], None, shape]
    if gaps == "refuse" and kind in ("gap", "halved"):
        message = "position_ids: expected each to be the one before plus 1, .* got (21 after 11|0 after 0) in row 0"
        with pytest.raises(ValueError, match=message):
            Rows.of(*called, gaps=gaps)
    elif expected and (kind == "restarting" or gaps == "cut"):
        assert starts(Rows.of(*called, gaps=gaps)) == [expected] * 2
        if kind == "restarting":
            with pytest.raises(ValueError, match="position_ids: expected one sequence a row with a cache, got several"):
                Rows.of(*called, gaps=gaps, cached=True)
    else:
        assert Rows.of(*called, gaps=gaps).documents is None


def test_documents_of_a_mask_take_precedence_over_positions() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 15] * 2, dtype=torch.int32)
    rows = Rows.of(ids[:, None, :, None], POSITIONS["restarting"], None, (2, LENGTH, LENGTH))
    assert rows.documents.equal(ids)


def test_tokens_are_moved_in_front_of_padding_and_back() -> None:
    x = torch.arange(3 * LENGTH).view(3, LENGTH)
    rows = Rows.of(padded(), None, None, (3, LENGTH, LENGTH))
    assert rows.num_valid.tolist() == [20, 13, 15]
    moved = rows.align(x, dim=1)
    assert [row[:3].tolist() for row in moved] == [[0, 1, 2], [27, 28, 29], [40, 41, 42]]
    assert rows.restore(moved, dim=1).equal(x)
    assert rows.align_keys(x[:, None, :, None])[:, 0, :, 0].equal(moved)
    behind = Rows.of(padded(seen=4), None, None, (3, LENGTH - 4, LENGTH))
    assert behind.positions[:, :2].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert behind.align(x[:, 4:], dim=1)[1, 0] == x[1, 7]


def test_positions_of_padding_tell_nothing() -> None:
    """Those of the tokens before and behind it rise by 1; the padding's own stand still, or fall."""
    odd = torch.where(MASK, MASK.cumsum(1) - 1, 50 - STEPS)
    assert Rows.of(padded(), odd, None, (3, LENGTH, LENGTH), gaps="refuse").documents is None


@pytest.mark.parametrize("axes", [IMAGE, FILM], ids=["image", "film"])
def test_positions_on_axes_restart_where_all_fall(axes: Tensor) -> None:
    text, behind = STEPS[:6].expand(3, -1), STEPS[:6].expand(3, -1) + 1 + axes[1:].max()
    for ending, expected in ((behind, None), (STEPS[:6].expand(3, -1), [14])):
        rows = Rows.of(None, torch.cat((text, axes, ending), 1)[:, None], None, (1, LENGTH, LENGTH))
        assert rows.documents is None if expected is None else starts(rows) == [expected]
        assert rows.position_ids is None


def test_offsets_count_padding_and_are_those_of_one_row() -> None:
    """Tokens were moved in front of their padding, and the starts were not."""
    offsets, shape = torch.tensor([0, 7, 12, 20]), (1, LENGTH, LENGTH)
    assert starts(Rows.of(None, POSITIONS["offset"][None], offsets, shape)) == [[7, 12]]
    mask = make_padding_mask(*shape, attention_mask=MASK[1:2])
    assert starts(Rows.of(mask, None, offsets, shape)) == [[5]]
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected one packed row, got 2"):
        Rows.of(None, None, offsets, (2, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected one sequence a row with a cache, got several"):
        Rows.of(None, None, offsets, (1, LENGTH, LENGTH + 4))


def test_what_contradicts_a_cache_is_refused() -> None:
    lengths = torch.tensor([15, 8, 15])
    shape = 3, LENGTH - 15, LENGTH
    positions = lengths[:, None] + torch.arange(5)
    Rows.of(padded(seen=15), positions + 30, None, shape, gaps="refuse").check_cache(lengths)  # a gap may come first
    rows = Rows.of(padded(seen=15), positions - torch.tensor([[0], [3], [9]]), None, shape, gaps="refuse")
    message = "position_ids: expected those of one sequence behind a cache, got 5 behind 8 tokens in row 1"
    with pytest.raises(ValueError, match=message):
        rows.check_cache(lengths)
    message = "attention_mask: expected 9 tokens before the new ones in row 1, as the cache has them, got 8"
    with pytest.raises(ValueError, match=message):
        rows.check_cache(lengths + torch.tensor([0, 1, 0]))
