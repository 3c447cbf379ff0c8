"""Where the queries stand: the one description of them that every mask starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Coordinates of ``T`` queries in their sequences, each int32 ``(B or 1, T)``.

    Along ``T`` the tokens never decrease, and neither do the first keys that queries see.

    Args:
        token: index of the query's own token in the key sequence.
        start: index of the first token of its document (0 without documents; negative if it precedes the keys).
        cmp_start: index of the first compressed token of its document in the list of compressed tokens.
        consecutive: whether no key stands between the tokens of two neighbouring queries.
        aligned: whether every start is 0, so that the blocks of all queries are the same runs of keys.
    """

    token: Tensor
    start: Tensor
    cmp_start: Tensor
    _: KW_ONLY
    consecutive: bool = True
    aligned: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token, start and cmp_start, as an operator takes them."""
        return self.token, self.start, self.cmp_start

    def map(self, change: Callable[[Tensor], Tensor]) -> Positions:
        """Change the three tensors alike."""
        changed = (change(self.token), change(self.start), change(self.cmp_start))
        return Positions(*changed, consecutive=self.consecutive, aligned=self.aligned)

    def at(self, queries: slice) -> Positions:
        """Keep some of the queries."""
        return self.map(lambda x: x[:, queries])

    @classmethod
    def of_sequence(cls, seq_len: int, device: torch.device | str | None = None) -> Positions:
        """Describe one whole sequence that starts at token 0."""
        token = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        zero = torch.zeros_like(token)
        return cls(token, zero, zero, aligned=True)

    @classmethod
    def of_queries(cls, tokens: Tensor) -> Positions:
        """Describe queries at increasing ``tokens``, int ``(T,)`` or ``(B, T)``, of sequences from token 0 on."""
        token = torch.atleast_2d(tokens.to(torch.int32)).contiguous()
        zero = torch.zeros_like(token)
        return cls(token, zero, zero, consecutive=False, aligned=True)

    def of_some(self, tokens: Tensor) -> Positions:
        """Keep some increasing ``tokens``, int ``(T,)`` or ``(B, T)``, where each token is a query."""
        rows = max(len(self.token), tokens.shape[0] if tokens.dim() == 2 else 1)
        index = torch.atleast_2d(tokens.to(torch.int64)).expand(rows, -1)
        kept = self.map(lambda x: x.expand(rows, -1).gather(1, index))
        return Positions(*kept.tensors, consecutive=False, aligned=self.aligned)


def positions_of(q: Tensor, positions: Positions | None) -> Positions:
    """Take ``None`` for what it stands for: ``q (B, H, T, D)`` is one whole sequence from token 0."""
    return Positions.of_sequence(q.shape[2], q.device) if positions is None else positions
