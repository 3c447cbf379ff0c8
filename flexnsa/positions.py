"""Where the queries stand: the one description of rows that every mask starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Row coordinates of ``T`` queries, each int32 ``(B or 1, T)`` and non-decreasing along ``T``.

    Args:
        token: index of the query's own token in the key sequence.
        start: index of the first token of its document (0 without documents; negative if it precedes the keys).
        cmp_start: index of the first compressed token of its document in the list of compressed tokens.
    """

    token: Tensor
    start: Tensor
    cmp_start: Tensor

    def at(self, rows: slice) -> Positions:
        """Keep some of the queries."""
        return Positions(self.token[:, rows], self.start[:, rows], self.cmp_start[:, rows])

    @classmethod
    def of_sequence(cls, seq_len: int, device: torch.device | str | None = None) -> Positions:
        """Describe one whole sequence that starts at token 0."""
        token = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        zero = torch.zeros_like(token)
        return cls(token, zero, zero)


def positions_of(q: Tensor, positions: Positions | None) -> Positions:
    """Take ``None`` for what it stands for: ``q (B, H, T, D)`` is one whole sequence from token 0."""
    return Positions.of_sequence(q.shape[2], q.device) if positions is None else positions
