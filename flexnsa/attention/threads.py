"""Runs heads on threads of their own on a CPU, because many small operations gain little from many threads each."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from flexnsa.attention.plan import THREADED_QUERIES

ROWS = 384
"""Rows of queries that a chunk of heads should have: products of fewer are slow."""


def grouped(k: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """View tensors of query heads, ``(B, Hq, ...)``, by the key heads ``(B, Hkv, ...)`` that they share."""
    return (torch.unflatten(x, 1, (k.shape[1], -1)) for x in tensors)


def repeated(k: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """View tensors of tokens, ``(B or 1, T)``, as if each of the key heads ``(B, Hkv, ...)`` had its own."""
    return (x[:, None].expand(*k.shape[:2], -1) for x in tensors)


def heads_at_once(q: Tensor, k: Tensor, chunk_size: int) -> int:
    """Count the key heads whose queries make a chunk of about ``ROWS`` rows."""
    return max(1, ROWS // max(1, q.shape[1] // k.shape[1] * min(chunk_size, q.shape[2])))


def run_heads_in_threads(work: Callable[..., None], views: Sequence[Tensor], size: int) -> None:
    """Call ``work(*views)`` for each part of the heads, several at once where that is faster; it writes to the views.

    Args:
        work: takes the views ``(b, h, ...)`` of some heads, and computes no gradient.
        views: each ``(B, Hkv, ...)``, the first ``(B, Hkv, G, T, ...)``.
        size: heads a part.
    """
    batch, heads, _, queries = views[0].shape[:4]
    rows, columns = max(1, size // heads), min(size, heads)
    parts = [
        [x[row : row + rows, head : head + columns] for x in views]
        for row in range(0, batch, rows)
        for head in range(0, heads, columns)
    ]

    threads = torch.get_num_threads()
    pays = views[0].device.type == "cpu" and queries >= THREADED_QUERIES and _thread_setters()
    workers = min(threads, len(parts)) if pays else 1
    if workers == 1:
        with torch.no_grad():
            for part in parts:
                work(*part)
        return

    inference = torch.is_inference_mode_enabled()

    def work_in_thread(part: list[Tensor]) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # a new thread inherits neither mode
            work(*part)

    with ThreadPoolExecutor(workers, initializer=_limit_this_thread, initargs=(threads // workers,)) as pool:
        list(pool.map(work_in_thread, parts))


def _limit_this_thread(number: int) -> None:
    """Set the number of threads of the calling thread's operations, and of no other thread's.

    ``torch.set_num_threads`` would also set the initial number of all threads that start later.
    """
    torch.get_num_threads()  # the first call sets the thread's initial number, which ours then replaces
    for set_threads in _thread_setters():
        set_threads(number)


@functools.cache
def _thread_setters() -> tuple[Callable[[int], object], ...]:
    """Return the functions that set a thread's own number in the OpenMP, and MKL, that torch is linked with.

    Empty where torch has no OpenMP, or where a library does not export what it is linked with, as on Windows: there
    heads run one after the other.
    """
    library = ctypes.CDLL(torch._C.__file__)  # pyright: ignore[reportPrivateUsage]
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    setters = tuple(getattr(library, name) for name in names if hasattr(library, name))
    return setters if hasattr(library, names[0]) else ()
