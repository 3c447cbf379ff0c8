"""Kernels that compile while a compiler traces the operators which launch them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

THREADS = 8
"""That compile: a layer has about twenty kernels of one to two seconds each."""
ALIGNMENT = 16
"""What Triton compiles pointers (bytes) and numbers for, if they are multiples of it."""


class Kernel:
    """``kernel[grid](*arguments)`` runs one program for each point of the grid.

    A launch on fake tensors runs nothing: it begins to compile on another thread, and the first launch on real ones
    waits for that. Triton releases Python's lock while it compiles.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._begun = dict[tuple[object, ...], Future[object]]()
        self._running = list[Future[object]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return what launches the kernel."""
        return partial(self._launch, grid)

    def compile_ahead(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Begin to compile for fake tensors, unless that has begun already."""
        device = args[0].device
        given = tuple(_signature(x) for x in args)
        key = (device, *given, *options.items())
        if key not in self._begun:
            pointers = [_pointer(x) if isinstance(x, Tensor) else x for x in args]
            self._begun[key] = _threads().submit(_compile, self.function, device, grid, pointers, options)
            self._running.append(self._begun[key])

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if isinstance(args[0], FakeTensor):
            self.compile_ahead(grid, *args, **options)
            return
        if self._running:
            wait(self._running)
            self._running.clear()
        self.function[grid](*args, **options)


def _signature(x: Any) -> object:
    """Return what of an argument Triton compiles for: dtype and alignment, or whether a number is 1 or divisible."""
    if isinstance(x, Tensor):
        return x.dtype, _offset(x) % ALIGNMENT
    kind: object = type(x)
    return (kind, x == 1, x % ALIGNMENT == 0) if isinstance(x, int) else kind


def _pointer(x: Tensor) -> object:
    """Return what Triton takes for a tensor where nothing runs."""
    from triton.runtime.jit import MockTensor  # pyright: ignore[reportMissingTypeStubs]

    pointer: Any = MockTensor(x.dtype)
    offset = _offset(x)
    pointer.data_ptr = lambda: offset
    return pointer


def _offset(x: Tensor) -> int:
    return int(x.storage_offset()) * x.element_size()


def _compile(function: Any, device: torch.device, grid: tuple[int, ...], args: list[Any], options: Any) -> None:
    with torch.cuda.device(device):
        function.warmup(*args, grid=grid, **options)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="flexnsa-compile")
