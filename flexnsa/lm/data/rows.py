"""A text as tokens, and training sequences of equal length, cut from it anywhere or packed with whole documents."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.packing import IGNORED, next_token_targets


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of text and the targets of their tokens.

    Args:
        tokens: int64 ``(B, S)``.
        targets: int64 ``(B, S)``, -100 where there is nothing to predict.
        document_ids: int ``(B, S)`` of packed sequences.
    """

    tokens: Tensor
    targets: Tensor
    document_ids: Tensor | None = None

    def num_targets(self) -> int:
        """Count the predictions, at least 1 to divide by."""
        return max(1, int((self.targets != IGNORED).sum()))

    def __len__(self) -> int:
        """Count the sequences."""
        return len(self.tokens)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply one function to all tensors."""
        ids = None if self.document_ids is None else change(self.document_ids)
        return Batch(change(self.tokens), change(self.targets), ids)

    def __getitem__(self, rows: slice) -> Batch:
        """Return some of the sequences."""
        return self.map(lambda x: x[rows])

    def split(self, num_rows: int) -> list[Batch]:
        """Cut into batches of ``num_rows`` sequences; the last may be smaller."""
        return [self[first : first + num_rows] for first in range(0, len(self), num_rows)]

    def tensors(self) -> list[Tensor]:
        """Return tokens, targets and, of packed sequences, document ids."""
        return [x for x in (self.tokens, self.targets, self.document_ids) if x is not None]

    def to(self, device: torch.device) -> Batch:
        """Move to a device, without waiting for the copy."""
        if device.type != "cuda":
            return self.map(lambda x: x.to(device))
        return self.map(lambda x: x.contiguous().pin_memory().to(device, non_blocking=True))


class Windows:
    """Sequences cut from a text anywhere.

    Args:
        text: ids of an integer dtype ``(tokens,)``, such as bytes; longer than a sequence.
        seq_len: tokens of a sequence.
    """

    def __init__(self, text: Tensor, seq_len: int) -> None:
        self.text, self.seq_len = text, seq_len
        self._last = len(text) - seq_len - 1

    def draw(self, draws: random.Random, num_rows: int) -> Batch:
        """Return sequences from random positions."""
        return self._at([draws.randint(0, self._last) for _ in range(num_rows)])

    def spread(self, num_rows: int) -> Batch:
        """Return evenly spaced sequences from the first token to the last, always the same."""
        return self._at([round(index * self._last / max(1, num_rows - 1)) for index in range(num_rows)])

    def _at(self, starts: list[int]) -> Batch:
        windows = torch.stack([self.text[start : start + self.seq_len + 1].long() for start in starts])
        return Batch(windows[:, :-1], windows[:, 1:])


class PackedDocuments:
    """Sequences packed with documents, which neither attention nor loss mixes.

    A document, such as a paragraph or a function, ends with the blank lines after it, so that a model learns where it
    ends, or with its file. A document longer than a sequence is cut into pieces. A sequence takes one document after
    the other; the last is cut to fit, so that every sequence is full.

    Args:
        text: uint8 ``(bytes,)``, a zero byte after every file; or the ids of its tokens, of an integer dtype.
        seq_len: tokens of a sequence.
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
        """Return sequences of documents drawn uniformly at random."""
        return self._batch((draws.choice(self.bounds) for _ in itertools.count()) for _ in range(num_rows))

    def spread(self, num_rows: int) -> Batch:
        """Return sequences of consecutive documents, their first ones evenly spaced, always the same."""
        step = len(self.bounds) / num_rows
        firsts = [int(index * step) for index in range(num_rows)]
        return self._batch(itertools.chain(self.bounds[first:], itertools.cycle(self.bounds)) for first in firsts)

    def _batch(self, rows: Iterable[Iterable[tuple[int, int]]]) -> Batch:
        packed = [self._pack(row) for row in rows]
        tokens, document_ids = (torch.stack(part) for part in zip(*packed, strict=True))
        return Batch(tokens, next_token_targets(tokens, document_ids), document_ids)

    def _pack(self, documents: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Fill one sequence; return its tokens and document ids, int64 ``(S,)``."""
        parts: list[Tensor] = []
        left = self.seq_len
        for start, end in documents:
            parts.append(self.text[start : min(end, start + left)].long())
            left -= len(parts[-1])
            if left == 0:
                break
        lengths = torch.tensor([len(part) for part in parts])
        return torch.cat(parts), torch.arange(len(parts)).repeat_interleave(lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a text.

    Args:
        ids: of an integer dtype as small as they allow, ``(tokens,)``.
        widths: int ``(tokens,)``, the number of bytes of each token.
        documents: ``[start, end)`` of each in tokens; by default found by blank lines, for ids that are bytes.
    """

    ids: Tensor
    widths: Tensor
    documents: list[tuple[int, int]] | None = None

    @classmethod
    def of_bytes(cls, data: Tensor) -> Tokens:
        """Return each byte, uint8 ``(bytes,)``, as a token."""
        return cls(data, torch.ones((), dtype=torch.int32).expand(len(data)))

    def rows(self, seq_len: int, pack: bool) -> PackedDocuments | Windows:
        """Return a source of sequences: packed with whole documents, or cut anywhere."""
        return PackedDocuments(self.ids, seq_len, self.documents) if pack else Windows(self.ids, seq_len)

    def bytes_of_spread_rows(self, seq_len: int, pack: bool, num_rows: int) -> int:
        """Count the bytes that ``rows(seq_len, pack).spread(num_rows)`` has to predict, at least 1 to divide by."""
        rows = self.rows(seq_len, pack)
        rows.text = self.widths  # the same sequences, with widths in place of ids
        targets = rows.spread(num_rows).targets
        return max(1, int(targets.clamp(min=0).sum()))


def document_bounds(text: bytes) -> list[tuple[int, int]]:
    """Find ``[start, end)`` of each document: up to and with the blank lines, or the zero byte, that end it."""
    ends = [match.end() for match in re.finditer(rb"\n(?:[ \t\r]*\n)+\0?|\0", text)]
    if not ends or ends[-1] < len(text):
        ends.append(len(text))
    return list(itertools.pairwise([0, *ends]))
