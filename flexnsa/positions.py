"""Where the queries stand: the one description of them that every mask starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Coordinates of ``T`` queries in their sequences, each int32 ``(B or 1, T)`` and non-decreasing along ``T``.

    Args:
        token: index of the query's own token in the key sequence.
        start: index of the first token of its document (0 without documents; negative if it precedes the keys).
        cmp_start: index of the first compressed token of its document in the list of compressed tokens.
    """

    token: Tensor
    start: Tensor
    cmp_start: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token, start and cmp_start, as an operator takes them."""
        return self.token, self.start, self.cmp_start

    def map(self, change: Callable[[Tensor], Tensor]) -> Positions:
        """Change the three tensors alike."""
        return Positions(change(self.token), change(self.start), change(self.cmp_start))

    def at(self, queries: slice) -> Positions:
        """Keep some of the queries."""
        return self.map(lambda x: x[:, queries])

    @classmethod
    def of_sequence(cls, seq_len: int, device: torch.device | str | None = None) -> Positions:
        """Describe one whole sequence that starts at token 0."""
        token = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        zero = torch.zeros_like(token)
        return cls(token, zero, zero)


def positions_of(q: Tensor, positions: Positions | None) -> Positions:
    """Take ``None`` for what it stands for: ``q (B, H, T, D)`` is one whole sequence from token 0."""
    return Positions.of_sequence(q.shape[2], q.device) if positions is None else positions
