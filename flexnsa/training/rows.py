"""What a step learns from: rows of equal length, cut from the text as it runs or packed with whole documents."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.packing import IGNORED, next_token_targets


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of text and what their tokens have to predict.

    Args:
        tokens: int64 ``(B, S)``.
        targets: int64 ``(B, S)``, -100 where there is nothing to predict.
        document_ids: int ``(B, S)`` of packed rows.
    """

    tokens: Tensor
    targets: Tensor
    document_ids: Tensor | None = None

    def num_targets(self) -> int:
        """Count the predictions, at least 1 to divide by."""
        return max(1, int((self.targets != IGNORED).sum()))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Batch:
        """Give some of the rows."""
        ids = None if self.document_ids is None else self.document_ids[rows]
        return Batch(self.tokens[rows], self.targets[rows], ids)

    def split(self, num_rows: int) -> list[Batch]:
        """Cut into batches of ``num_rows`` rows, the last of what is left."""
        return [self[first : first + num_rows] for first in range(0, len(self), num_rows)]

    def to(self, device: torch.device) -> Batch:
        """Move to a device."""
        ids = None if self.document_ids is None else self.document_ids.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), ids)


class Windows:
    """Rows cut from a text wherever they fall; what stands in them is one sequence.

    Args:
        text: ids of an integer dtype ``(tokens,)``, such as bytes; longer than a row.
        seq_len: tokens of a row.
    """

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len
        self._last = len(text) - seq_len - 1

    def draw(self, draws: random.Random, num_rows: int) -> Batch:
        """Give rows from random places."""
        return self._at([draws.randint(0, self._last) for _ in range(num_rows)])

    def spread(self, num_rows: int) -> Batch:
        """Give evenly spaced rows from the first byte to the last, always the same ones."""
        return self._at([round(index * self._last / max(1, num_rows - 1)) for index in range(num_rows)])

    def _at(self, starts: list[int]) -> Batch:
        windows = torch.stack([self.text[start : start + self.seq_len + 1].long() for start in starts])
        return Batch(windows[:, :-1], windows[:, 1:])


class PackedDocuments:
    """Rows packed with documents, each of which attention and loss keep to itself.

    A document is what stands between blank lines, a paragraph or a function, and ends with them: they tell a model
    that it is over. The end of a file ends a document too, and one longer than a row is cut into pieces of a row. A
    row takes one document after the other; the last is cut to fit, so that every row is full.

    Args:
        text: uint8 ``(bytes,)``, a zero byte behind every file; or the ids of its tokens, of an integer dtype.
        seq_len: tokens of a row.
        documents: ``[start, end)`` of each in tokens; by default found in the bytes.
    """

    def __init__(self, text: Tensor, seq_len: int, documents: list[tuple[int, int]] | None = None) -> None:
        self.text, self.seq_len = text, seq_len
        self.bounds = [
            (start, min(start + seq_len, end))
            for first, end in (document_bounds(text.numpy().tobytes()) if documents is None else documents)
            for start in range(first, end, seq_len)
        ]

    def draw(self, draws: random.Random, num_rows: int) -> Batch:
        """Give rows of documents drawn at random, each as likely as any other."""
        return self._batch((draws.choice(self.bounds) for _ in itertools.count()) for _ in range(num_rows))

    def spread(self, num_rows: int) -> Batch:
        """Give rows of neighbours, their first documents evenly spaced, always the same ones."""
        step = len(self.bounds) / num_rows
        firsts = [int(index * step) for index in range(num_rows)]
        return self._batch(itertools.chain(self.bounds[first:], itertools.cycle(self.bounds)) for first in firsts)

    def _batch(self, rows: Iterable[Iterable[tuple[int, int]]]) -> Batch:
        packed = [self._pack(row) for row in rows]
        tokens, document_ids = (torch.stack(part) for part in zip(*packed, strict=True))
        return Batch(tokens, next_token_targets(tokens, document_ids), document_ids)

    def _pack(self, documents: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Fill one row; give its tokens and document ids, int64 ``(S,)``."""
        parts: list[Tensor] = []
        room = self.seq_len
        for start, end in documents:
            parts.append(self.text[start : min(end, start + room)].long())
            room -= len(parts[-1])
            if room == 0:
                break
        lengths = torch.tensor([len(part) for part in parts])
        return torch.cat(parts), torch.arange(len(parts)).repeat_interleave(lengths)


def document_bounds(text: bytes) -> list[tuple[int, int]]:
    """Find ``[start, end)`` of each document: up to and with the blank lines, or the zero byte, that end it."""
    ends = [match.end() for match in re.finditer(rb"\n(?:[ \t\r]*\n)+\0?|\0", text)]
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    return list(itertools.pairwise([0, *ends]))
