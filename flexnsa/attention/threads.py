"""Heads side by side: each runs on threads of its own, because many small operations gain little from many threads."""

from __future__ import annotations

import ctypes
import functools
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
    return (torch.unflatten(x, 1, (k.shape[1], -1)) for x in tensors)


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
    pays = views[0].device.type == "cpu" and queries >= FEWEST_QUERIES and _thread_setters()
    workers = min(threads, len(parts)) if pays else 1
    if workers == 1:
        for part in parts:
            work_on(part)
        return
    with ThreadPoolExecutor(workers, initializer=_limit_this_thread, initargs=(threads // workers,)) as pool:
        list(pool.map(work_on, parts))


def _limit_this_thread(number: int) -> None:
    """Give the operations of the calling thread so many threads, and no other thread another number.

    ``torch.set_num_threads`` would also set what threads begin with that are still to come, anybody's.
    """
    torch.get_num_threads()  # at the first question a thread takes the number it begins with: ours comes after
    for set_threads in _thread_setters():
        set_threads(number)


@functools.cache
def _thread_setters() -> tuple[Callable[[int], object], ...]:
    """Find what sets a thread's own number in the OpenMP that torch is linked with, and in MKL where it is.

    Nothing where torch computes without OpenMP or where a library does not tell what it is linked with, as on Windows:
    there heads go one after the other.
    """
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    found = tuple(getattr(library, name) for name in names if hasattr(library, name))
    return found if hasattr(library, names[0]) else ()
