"""Chunks of queries that see intervals of keys, and the keys that a chunk reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

ALIGNED = 16
"""A chunk reads a multiple of this number of keys; score rows of odd length cost a tenth of the time."""


class IntervalInputs(NamedTuple):
    """Queries ``(B, Hq, T, Dk)``, keys and values ``(B, Hkv, S, D)``, and the keys ``[lo, hi)`` that each query sees.

    Neither bound, int ``(B or 1, T)``, decreases along ``T``. At most ``chunk_size`` queries have scores at a time, on
    each thread.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lo: Tensor
    hi: Tensor
    scale: float
    chunk_size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries ``[start, stop)``; some see keys in ``[first, last)``, all see those in ``[inner_first, inner_last)``."""

    start: int
    stop: int
    first: int
    last: int
    inner_first: int
    inner_last: int

    @property
    def queries(self) -> slice:
        """The queries."""
        return slice(self.start, self.stop)

    def ragged(self) -> Iterator[slice]:
        """Yield slices of ``[first, last)``, counted from ``first``, of keys that only some queries see."""
        if self.inner_first >= self.inner_last:
            yield slice(0, self.last - self.first)
        else:
            yield slice(0, self.inner_first - self.first)
            yield slice(self.inner_last - self.first, self.last - self.first)


def chunks_of(lo: Tensor, hi: Tensor, size: int) -> list[Chunk]:
    """Split the queries into chunks; a chunk's first and last query decide its range, as bounds never decrease."""
    starts = torch.arange(0, lo.shape[-1], size, device=lo.device)
    stops = (starts + size).clamp_max(lo.shape[-1])
    lo, hi = lo.flatten(0, -2), hi.flatten(0, -2)
    ends = (
        starts,
        stops,
        lo[:, starts].amin(0) // ALIGNED * ALIGNED,
        -(-hi[:, stops - 1].amax(0) // ALIGNED) * ALIGNED,
        lo[:, stops - 1].amax(0),
        hi[:, starts].amin(0),
    )
    chunks = cast("list[list[int]]", torch.stack([x.long() for x in ends], 1).tolist())  # pyright: ignore[reportUnknownMemberType]
    return [Chunk(*chunk) for chunk in chunks]
