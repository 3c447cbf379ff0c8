"""Unpacks prompts that are packed in one sequence into an empty cache: document ``b`` becomes sequence ``b``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.cache.rows import RowCache
from flexnsa.cache.steps import BufferSizes, NewBlocks, Step, count_compressed
from flexnsa.masks.positions import Positions
from flexnsa.primitives import describe


@dataclass(frozen=True, slots=True)
class Documents:
    """The tokens of packed documents, each of which becomes a sequence of the cache.

    Args:
        row: int64 ``(1, S)``, the sequence of each token.
        token: int32 ``(1, S)``, its position there.
        lengths: int32 ``(B,)``, of the sequences.
        count: int64 ``()``, the number of documents, those without tokens included.
    """

    row: Tensor
    token: Tensor
    lengths: Tensor
    count: Tensor


def check_pack(x: Tensor, cache: RowCache, lengths: Tensor | None) -> None:
    """Check that ``x (1, S, dim)`` is one sequence of packed documents, and the cache empty.

    Raises:
        ValueError: the host does not know the cache to be empty, ``x`` has several sequences, or lengths were given.
    """
    if not cache.is_empty:
        raise ValueError("document_ids: expected None with a cache that is not known to be empty, got documents")
    if len(x) != 1:
        raise ValueError(f"x: expected one packed row with document_ids and a cache, got {len(x)}")
    if lengths is not None:
        raise ValueError(f"lengths: expected None with document_ids, got {describe(lengths)}")


def unpack(positions: Positions, rows: Tensor) -> Documents:
    """Count the documents and their tokens.

    As many documents as sequences become these in order. Where there are fewer, and the last has the index of the last
    sequence, each becomes the sequence of its own index: an index that no token has is that of an empty document.

    Args:
        positions: of the tokens ``(1, S)`` in their documents.
        rows: int64 ``(B,)``, the indices of all sequences.
    """
    row = (positions.token == positions.start).cumsum(1) - 1
    count = row[0, -1] + 1
    number = positions.document
    if number is not None:
        some_are_empty = (count < len(rows)) & (number[0, 0] >= 0) & (number[0, -1] == len(rows) - 1)
        row, count = torch.where(some_are_empty, number, row), torch.where(some_are_empty, len(rows), count)
    begin, end = (torch.searchsorted(row[0], rows, right=right) for right in (False, True))
    return Documents(row, positions.token - positions.start, (end - begin).to(torch.int32), count)


def locate_documents(
    documents: Documents,
    positions: Positions,
    block_starts: Mapping[str, Tensor],
    sizes: BufferSizes,
    *,
    longest: int | None,
) -> Step:
    """Locate the tokens of documents, and their compressed tokens, as those of sequences.

    Args:
        documents: see :func:`unpack`.
        positions: of the tokens in the packed sequence.
        block_starts: by kind, int ``(1, N)``, the first tokens of the blocks that are compressed, padded on the right.
        sizes: of the buffers of the cache.
        longest: see :class:`flexnsa.cache.steps.Step`.
    """
    row, token, length = documents.row, documents.token, documents.lengths[documents.row]
    is_kept = token < length
    rows = {"slc": row, **dict.fromkeys(sizes.lookback, row)}
    blocks: dict[str, NewBlocks] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    kept = {kind: starts for kind, starts in block_starts.items() if kind in sizes.compressed}
    for kind, first_tokens in kept.items():
        config, first = sizes.compressed[kind], first_tokens.to(torch.int64)
        start, rows[kind] = token.gather(1, first), row.gather(1, first)
        count = count_compressed(documents.lengths, config).sum()
        found[kind] = start // config.compress_stride, torch.arange(first.shape[1], device=first.device) < count
        blocks[kind] = NewBlocks(start, first_tokens, emits=True)
    return Step(
        before=torch.zeros_like(documents.lengths)[:, None],
        after=documents.lengths[:, None],
        positions=positions,
        window_positions=positions,
        window_in_place=False,
        blocks=blocks,
        slots=sizes.slots(token, is_kept, length, found),
        rows=rows,
        lost=~is_kept,
        longest=longest,
    )
