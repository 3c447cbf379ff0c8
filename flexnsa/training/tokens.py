"""A text as a model sees it: ids, the bytes that each stands for, and where documents are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexnsa.training.rows import PackedDocuments, Windows


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of a text.

    Args:
        ids: of an integer dtype as small as they allow, ``(tokens,)``.
        widths: int ``(tokens,)``, the bytes of text that each token stands for.
        documents: ``[start, end)`` of each in tokens; by default, as blank lines tell of ids that are bytes.
    """

    ids: Tensor
    widths: Tensor
    documents: list[tuple[int, int]] | None = None

    @classmethod
    def of_bytes(cls, data: Tensor) -> Tokens:
        """Take each byte, uint8 ``(bytes,)``, for a token."""
        return cls(data, torch.ones((), dtype=torch.int32).expand(len(data)))

    def rows(self, seq_len: int, pack: bool) -> PackedDocuments | Windows:
        """Give what rows are drawn from: whole documents, or text wherever it is cut."""
        return PackedDocuments(self.ids, seq_len, self.documents) if pack else Windows(self.ids, seq_len)

    def bytes_of_spread_rows(self, seq_len: int, pack: bool, num_rows: int) -> int:
        """Count the bytes that ``rows(seq_len, pack).spread(num_rows)`` has to predict, at least 1 to divide by."""
        rows = self.rows(seq_len, pack)
        rows.text = self.widths  # the same rows, of widths in the place of ids
        targets = rows.spread(num_rows).targets
        return max(1, int(targets.clamp(min=0).sum()))
