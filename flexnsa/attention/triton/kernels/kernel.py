"""Triton's ``jit``, typed: its kernels compile while PyTorch traces the operators which launch them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flexnsa.attention.tiles.device import ALIGNMENT
from flexnsa.operators.replay import recorder

if TYPE_CHECKING:
    from triton.runtime.jit import KernelParam  # pyright: ignore[reportMissingTypeStubs]

MOST_LAUNCHES = 4096
"""Launches of a kernel that are remembered at a time: lengths that change with every call must not fill the memory."""
Grid = tuple[int, ...]
F = TypeVar("F", bound=Callable[..., object])


class Compiled(Protocol):
    """A compiled kernel."""

    @property
    def run(self) -> object:
        """What launches it; the first read builds that, and loads the kernel on the current GPU."""

    def __getitem__(self, grid: Grid, /) -> Callable[..., object]: ...


class Function(Protocol):
    """What ``triton.jit`` returns."""

    __name__: str
    fn: Callable[..., object]
    params: Sequence[KernelParam]

    def __getitem__(self, grid: Grid, /) -> Callable[..., Compiled | None]: ...
    def warmup(self, *args: object, grid: Grid, **options: object) -> Compiled:
        """Compile."""
        ...


class Kernel:
    """``kernel[grid](*arguments)`` runs one program for each point of the grid; the first argument is a tensor.

    On fake tensors it runs nothing and begins to compile on another thread. The next launch on real ones waits for it.

    Triton searches for the compiled variant at every launch, which takes longer than to launch it. Here what it found
    is remembered for later launches with equal numbers, and tensors of the same dtypes and alignment.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._cached = dict[tuple[object, ...], tuple[Compiled, Sequence[object]]]()
        self._begun = set[tuple[object, ...]]()
        self._compiling = list[Future[None]]()

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(signature(self.function.fn).parameters)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """Return what launches the kernel."""
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, first: Tensor, *rest: object, **options: object) -> None:
        if isinstance(first, FakeTensor):
            self.compile_ahead(grid, first, *rest, **options)
            return
        if self._compiling:
            wait(self._compiling)  # what failed there fails again, here
            self._compiling.clear()
        properties = [x if type(x) is int else _property_of(x) for x in rest]
        key = (first.device, _property_of(first), *properties, *options, *map(_property_of, options.values()))
        cached = self._cached.get(key)
        if cached is None:
            compiled = self.function[grid](first, *rest, **options)
            # The interpreter compiles nothing, and Triton may do it later.
            if compiled is not None and hasattr(type(compiled), "__getitem__"):
                cached = compiled, [options[name] for name in self._names if name in options]
                if len(self._cached) >= MOST_LAUNCHES:
                    self._cached.clear()
                self._cached[key] = cached
        else:
            compiled, constants = cached
            compiled[(*grid, 1, 1)[:3]](first, *rest, *constants)
        record = recorder()
        if record is not None and cached is None:
            record.give_up()
        elif record is not None and cached is not None:
            record.launch(cached[0][(*grid, 1, 1)[:3]], (first, *rest, *cached[1]))

    def compile_ahead(self, grid: Grid, first: Tensor, *rest: object, **options: object) -> None:
        """Begin to compile for these arguments, unless that has begun already."""
        args = [_Pointer(x.dtype, _address(x)) if isinstance(x, Tensor) else x for x in (first, *rest)]
        key = (first.device, *map(_specialization, args, self.function.params), *options.items())
        if key not in self._begun:
            self._begun.add(key)
            self._compiling.append(_threads().submit(_compile, self.function, first.device, grid, args, options))


@dataclass(frozen=True, slots=True)
class _Pointer:
    """The dtype and address of a tensor, which are all that Triton reads of it to compile."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


def _property_of(x: object) -> object:
    """Return what Triton reads of an argument to find a variant: equal numbers of other types have others."""
    return (x.dtype, x.data_ptr() % ALIGNMENT) if isinstance(x, Tensor) else (type(x), x)


def _address(x: Tensor) -> int:
    """Return where a tensor begins in its memory, in bytes; memory itself is aligned."""
    return int(x.storage_offset()) * x.element_size()


def _specialization(x: object, parameter: KernelParam) -> object:
    """Return the properties of an argument for which Triton compiles a variant."""
    if isinstance(x, _Pointer):
        return x.dtype, x.address % ALIGNMENT
    if isinstance(x, int) and not parameter.do_not_specialize:
        return x == 1, x % ALIGNMENT == 0
    return str(type(x))


def _compile(
    function: Function, device: torch.device, grid: Grid, args: Sequence[object], options: dict[str, object]
) -> None:
    with torch.cuda.device(device):
        compiled = function.warmup(*args, grid=grid, **options)
        _ = compiled.run  # Triton 3.6 builds a launcher with a C compiler, which takes 0.3 s


@cache
def _threads() -> ThreadPoolExecutor:
    # Compilers import Gluon when they run. An import on two threads at a time may fail, so it comes before.
    import_module("triton.experimental.gluon")
    # A layer has about twenty kernels, each of which compiles in up to two seconds.
    return ThreadPoolExecutor(8, thread_name_prefix="flexnsa-compile")


if TYPE_CHECKING:

    @overload
    def jit(function: F, /) -> F: ...
    @overload
    def jit(*, do_not_specialize: list[str]) -> Callable[[Callable[..., object]], Kernel]: ...
    def jit(*arguments: object, **options: object) -> object:
        """Compile a function that kernels call or, with ``do_not_specialize``, a kernel."""
else:
    import triton

    def jit(*arguments, **options):  # noqa: D103
        return triton.jit(*arguments) if arguments else lambda function: Kernel(triton.jit(**options)(function))
