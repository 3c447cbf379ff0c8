"""Prompts packed in one row, on their way into the rows of an empty cache: document ``b`` into row ``b``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.decoding.row_cache import RowCache
from flexnsa.decoding.steps import Slots, Step, count_compressed, ring_slots
from flexnsa.positions import Positions
from flexnsa.validation import describe


@dataclass(frozen=True, slots=True)
class Documents:
    """The tokens of a packed row, and where they stand in rows of their own.

    Args:
        row: int64 ``(1, S)``.
        token: int32 ``(1, S)``, the position in the row.
        lengths: int32 ``(B,)``, of the rows.
        count: int64 ``()``, the documents that there are.
    """

    row: Tensor
    token: Tensor
    lengths: Tensor
    count: Tensor


def check_pack(x: Tensor, cache: RowCache, lengths: Tensor | None) -> None:
    """Demand one row ``x (1, S, dim)`` of documents for an empty cache.

    Raises:
        ValueError: the cache is not known to be empty, there are several rows, or lengths for them.
    """
    if not cache.is_empty:
        raise ValueError("document_ids: expected None with a cache that is not known to be empty, got documents")
    if len(x) != 1:
        raise ValueError(f"x: expected one packed row with document_ids and a cache, got {len(x)}")
    if lengths is not None:
        raise ValueError(f"lengths: expected None with document_ids, got {describe(lengths)}")


def unpack(positions: Positions, rows: Tensor) -> Documents:
    """Count the documents, and their tokens.

    Args:
        positions: of the tokens ``(1, S)`` in their documents.
        rows: int64 ``(B,)``, the numbers of the rows that there are.
    """
    row = (positions.token == positions.start).cumsum(1) - 1
    begin, end = (torch.searchsorted(row[0], rows, right=right) for right in (False, True))
    return Documents(row, positions.token - positions.start, (end - begin).to(torch.int32), row[0, -1] + 1)


def locate_documents(documents: Documents, positions: Positions, first_tokens: Tensor, sizes: Slots) -> Step:
    """Locate the tokens of documents as those of rows, and their compressed tokens.

    Args:
        documents: see :func:`unpack`.
        positions: of the tokens in the packed row.
        first_tokens: int ``(1, N)``, where compressed tokens begin; those that there are, then others.
        sizes: of the buffers of the cache.
    """
    row, token, after = documents.row, documents.token, documents.lengths[:, None]
    before, all_new = torch.zeros_like(after), torch.ones_like(token, dtype=torch.bool)
    first = first_tokens.to(torch.int64)
    block = token.gather(1, first) // sizes.config.compress_stride
    made = count_compressed(documents.lengths, sizes.config).sum()
    is_made = torch.arange(first.shape[1], device=first.device) < made
    length = documents.lengths[row]
    return Step(
        before=before,
        after=after,
        positions=positions,
        window_positions=positions,
        window_in_place=False,
        block=block,
        first_tokens=first_tokens,
        slots={
            "slc": token.long(),
            "cmp": torch.where(is_made, block, sizes.size("cmp")).long(),
            **{kind: ring_slots(token, all_new, length, sizes.size(kind)) for kind in sizes.lookback},
        },
        rows={"slc": row, "cmp": row.gather(1, first), **dict.fromkeys(sizes.lookback, row)},
        lost=~all_new,
        emits=True,
    )
