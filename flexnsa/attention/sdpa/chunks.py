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
    starts = range(0, lo.shape[-1], size)
    stops = [min(start + size, lo.shape[-1]) for start in starts]
    edges = torch.stack((lo, hi)).flatten(1, -2)[..., [*starts, *(stop - 1 for stop in stops)]]
    by_kind = torch.stack(edges.aminmax(dim=1)).view(8, len(stops))  # (least, most) of (lo, hi) at (starts, stops)
    ends = cast("list[list[int]]", by_kind[[0, 7, 5, 2]].T.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [
        Chunk(start, stop, first // ALIGNED * ALIGNED, -(-last // ALIGNED) * ALIGNED, inner_first, inner_last)
        for start, stop, (first, last, inner_first, inner_last) in zip(starts, stops, ends, strict=True)
    ]
