"""Three measures of the memory of a computation: the allocator, the tensors saved by autograd, the resident set.

- *Allocated*: bytes that PyTorch's allocator has handed out and that are not freed, on CPU and CUDA.
- *Saved*: storages that autograd keeps from forward to backward, each once, without parameters.
- *Resident*: memory that the operating system counts for the process, buffers of libraries included. The C library is
  set to return freed blocks at once, because what it would keep depends on the history of the process.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function

from flexnsa.lm.measure.memory import peak_resident_bytes, resident_bytes


class AllocatorProbe:
    """Allocated bytes above those at the start, at named moments, and the peaks between them.

    Use as a context manager; call :meth:`mark` inside, and read ``at`` and ``peak`` after it. On CUDA the caching
    allocator counts; on CPU, where it does not, the profiler's events are summed. They are of one thread (pytorch issue
    192290), so on CPU the work is limited to one thread.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.at: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self._start = 0
        self._threads = torch.get_num_threads()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> AllocatorProbe:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self._start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        else:
            torch.set_num_threads(1)
            self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        """Record what is allocated now; ``peak[name]`` is the peak since the previous mark."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.at[name] = torch.cuda.memory_allocated() - self._start
            self.peak[name] = torch.cuda.max_memory_allocated() - self._start
            torch.cuda.reset_peak_memory_stats()
        else:
            with record_function(f"mark:{name}"):
                pass

    def __exit__(self, *error: object) -> None:
        if self.device == "cuda":
            return
        self._profile.__exit__(*error)
        torch.set_num_threads(self._threads)
        recorded: list[Any] = self._profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
        events = [(name, event) for event in recorded if (name := event.name()).startswith(("[memory]", "mark:"))]
        live = most = 0
        for name, event in sorted(events, key=lambda named: named[1].start_ns()):
            if name.startswith("mark:"):
                self.at[name[5:]], self.peak[name[5:]], most = live, most, live
            elif event.device_type().name == "CPU":
                live += event.nbytes()
                most = max(most, live)


@dataclass
class SavedBytes:
    """Bytes of the storages that autograd holds. Weak references tell them apart: a freed address is used again."""

    storages: dict[StorageWeakRef, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes held now, each storage once: read it while the result of the computation lives."""
        return sum(nbytes for storage, nbytes in self.storages.items() if not storage.expired())


@contextmanager
def saved_for_backward(leave_out: Iterator[Tensor] | list[Tensor]) -> Iterator[SavedBytes]:
    """Collect what autograd saves inside the context, except the storages of the given tensors."""
    known = {StorageWeakRef(tensor.untyped_storage()) for tensor in leave_out}
    saved = SavedBytes()

    def remember(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in known:
            saved.storages[reference] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        yield saved


class ResidentProbe:
    """The resident set above that at the start: now, and its peak."""

    def __init__(self) -> None:
        _return_freed_blocks()
        _forget_peak()
        self.start = resident_bytes()

    def now(self) -> int:
        """Return the resident bytes above those at the start."""
        return resident_bytes() - self.start

    def peak(self) -> int:
        """Return the peak of the resident bytes above those at the start."""
        return peak_resident_bytes() - self.start


def _return_freed_blocks(threshold: int = 2**18) -> None:
    """Have glibc map larger blocks one by one and unmap them when freed."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        mmap_threshold = -3
        ctypes.CDLL(None).mallopt(mmap_threshold, threshold)
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
