"""Heads side by side: each runs on threads of its own, because many small operations gain little from many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

FEWEST_QUERIES = 256
"""Fewer are done before threads have started."""
ROWS = 384
"""Heads are taken together until a chunk of their queries has so many rows: products of fewer are slow."""


def grouped(k: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """View what query heads own, ``(B, Hq, ...)``, by the key heads ``(B, Hkv, ...)`` that they share."""
    return (x.unflatten(1, (k.shape[1], -1)) for x in tensors)


def repeated(k: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """View what belongs to tokens, ``(B or 1, T)``, as if each of the key heads ``(B, Hkv, ...)`` had its own."""
    return (x[:, None].expand(*k.shape[:2], -1) for x in tensors)


def heads_at_once(q: Tensor, k: Tensor, chunk_size: int) -> int:
    """Count the key heads whose queries make a chunk of about ``ROWS`` rows."""
    return max(1, ROWS // max(1, q.shape[1] // k.shape[1] * min(chunk_size, q.shape[2])))


def side_by_side(work: Callable[..., None], views: Sequence[Tensor], size: int) -> None:
    """Call ``work(*views)`` on one part of the heads after the other, or on several at once; it writes to the views.

    Args:
        work: takes the views ``(b, h, ...)`` of some heads; nothing that it does has a gradient.
        views: each ``(B, Hkv, ...)``, the first ``(B, Hkv, G, T, ...)``.
        size: heads a part.
    """
    batch, heads, _, queries = views[0].shape[:4]
    rows, columns = max(1, size // heads), min(size, heads)
    parts = [
        (slice(row, row + rows), slice(head, head + columns))
        for row in range(0, batch, rows)
        for head in range(0, heads, columns)
    ]

    def work_on(part: tuple[slice, slice]) -> None:
        with torch.no_grad():  # a new thread does not know what its starter has switched off
            work(*(x[part] for x in views))

    threads = torch.get_num_threads()
    workers = min(threads, len(parts)) if views[0].device.type == "cpu" and queries >= FEWEST_QUERIES else 1
    if workers == 1:
        for part in parts:
            work_on(part)
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            list(pool.map(work_on, parts))
    finally:
        torch.set_num_threads(threads)  # for threads still to come; this one never had another number
