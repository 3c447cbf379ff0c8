"""The positions of queries among the keys, from which every mask is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of ``T`` queries in their sequences, each int32 ``(B or 1, T)``; ``document`` may be int64.

    Along ``T``, ``token`` never decreases, nor does the first key that a query sees.

    Args:
        token: index of the query's token among the keys.
        start: index of the first token of its document: 0 without documents, negative if it precedes the keys.
        cmp_start: index of the first compressed token of its document among the compressed keys.
        consecutive: whether neighbouring queries have neighbouring tokens.
        aligned: whether every start is 0, so that all queries share one block grid.
        document: id of the token's document, for whole packed sequences only; masks do not use it.
        longest: upper bound of the tokens of a document, where the host knows one; it bounds the rows of scores.
    """

    token: Tensor
    start: Tensor
    cmp_start: Tensor
    _: KW_ONLY
    consecutive: bool = True
    aligned: bool = False
    document: Tensor | None = None
    longest: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``token``, ``start`` and ``cmp_start``, as arguments of an operator."""
        return self.token, self.start, self.cmp_start

    def map(self, change: Callable[[Tensor], Tensor]) -> Positions:
        """Apply one function to the three tensors."""
        changed = (change(self.token), change(self.start), change(self.cmp_start))
        return Positions(*changed, consecutive=self.consecutive, aligned=self.aligned, longest=self.longest)

    def at(self, queries: slice) -> Positions:
        """Return the positions of a slice of the queries."""
        return self.map(lambda x: x[:, queries])

    @classmethod
    def of_sequence(cls, seq_len: int, device: torch.device | str | None = None) -> Positions:
        """Return the positions of every token of one sequence from token 0."""
        token = torch.arange(seq_len, dtype=torch.int32, device=device)[None]
        zero = torch.zeros_like(token)
        return cls(token, zero, zero, aligned=True)

    @classmethod
    def of_queries(cls, tokens: Tensor) -> Positions:
        """Return the positions of queries at increasing ``tokens``, int ``(T,)`` or ``(B, T)``, without documents."""
        token = torch.atleast_2d(tokens.to(torch.int32)).contiguous()
        zero = torch.zeros_like(token)
        return cls(token, zero, zero, consecutive=False, aligned=True)

    def at_tokens(self, tokens: Tensor) -> Positions:
        """Keep the queries at increasing ``tokens``, int ``(T,)`` or ``(B, T)``; requires one query for every token."""
        rows = max(len(self.token), tokens.shape[0] if tokens.dim() == 2 else 1)
        index = torch.atleast_2d(tokens.to(torch.int64)).expand(rows, -1)
        gathered = self.map(lambda x: x.expand(rows, -1).gather(1, index))
        return replace(gathered, consecutive=False)


def tensors_of(positions: Positions | None) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """Return the three tensors of ``positions``, or three times None, as arguments of an operator."""
    return (None, None, None) if positions is None else positions.tensors


def positions_of(q: Tensor, positions: Positions | None) -> Positions:
    """Return ``positions``, where None means that ``q (B, H, T, D)`` is one whole sequence from token 0."""
    return Positions.of_sequence(q.shape[2], q.device) if positions is None else positions
