"""Which queries of each sequence the selection loss compares: a function of numbers alone, the same on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.masks.intervals import stored
from flexnsa.masks.positions import Positions, positions_of

BITS = 0xFFFFFFFF


def sampled_tokens(
    seq_len: int,
    num_queries: int,
    seed: int | Tensor,
    step: int | Tensor,
    sequence_ids: Tensor,
    lengths: Tensor | None = None,
) -> Tensor:
    """Choose one token from each of ``num_queries`` equal stretches of every sequence, int64 ``(B, m)``.

    A shorter sequence gives all of its tokens, and then -1 for none. The choice is a function of the arguments alone,
    in integers, so that it is the same on every device, whatever was drawn before.

    Args:
        seq_len: ``S``.
        num_queries: ``m``, at most.
        seed: of a run.
        step: of the run.
        sequence_ids: int ``(B,)``, the index of each sequence in the global batch.
        lengths: int ``(B,)``, tokens of each sequence that padding follows; by default ``S``.
    """
    sequence_ids = sequence_ids.to(torch.int64)
    length = (torch.full_like(sequence_ids, seq_len) if lengths is None else lengths.to(torch.int64))[:, None]
    count = length.clamp_max(num_queries)
    slot = torch.arange(min(num_queries, seq_len) + 1, device=sequence_ids.device)
    edges = slot * length // count.clamp_min(1)
    first, size = edges[:, :-1], edges.diff().clamp_min(1)
    of_run = _mixed(_mixed(torch.zeros_like(sequence_ids) + seed) ^ step)
    drawn = first + _mixed(_mixed(of_run ^ sequence_ids)[:, None] ^ first) % size
    return drawn.where(slot[:-1] < count, -1)


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64: the halves are joined to 32 bits, which Wellons' lowbias32 permutes."""
    x = (x ^ (x >> 32)) & BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & BITS
    # Inductor would write x out wherever it is read, and so nest four calls into tens of thousands of operations.
    return stored(x ^ (x >> 16))


class QuerySample(Protocol):
    """Which queries are compared, of those at hand; ranks that share a sequence share them out."""

    @property
    def tokens(self) -> Tensor:
        """Tokens of whole sequences, int64 ``(B, m)``, where -1 is no token."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """Return the sampled queries that are at hand, of ``x (B or 1, H, T, D)``, and any others for the rest."""
        ...

    def compared(self, x: Tensor) -> Tensor:
        """Return the queries that are compared here, given what :meth:`take` returned."""
        ...

    def positions(self, whole: Positions) -> Positions:
        """Locate those that are compared here, given the positions of all queries at hand."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The queries at ``tokens``, int64 ``(B, m)``, of whole sequences, where -1 is no token: a :class:`QuerySample`."""

    tokens: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Return the queries at the tokens, of ``x (B or 1, H, T, D)``."""
        index = self.tokens.clamp_min(0)[:, None, :, None]
        return x.expand(len(index), -1, -1, -1).gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

    def compared(self, x: Tensor) -> Tensor:
        """Return all of them."""
        return x

    def positions(self, whole: Positions) -> Positions:
        """Locate the tokens; -1 precedes its sequence, so it sees no key."""
        sampled = whole.at_tokens(self.tokens.clamp_min(0))
        token = sampled.token.where(self.tokens >= 0, sampled.start - 1)
        return Positions(token, sampled.start, sampled.cmp_start, consecutive=False, aligned=sampled.aligned)


def at_sample(call: Call, q: Tensor, sample: QuerySample) -> Call:
    """Return a call of the sampled queries, given that of all, ``q (B, H, T, D)``."""
    return replace(call, positions=sample.positions(positions_of(q, call.positions)))
