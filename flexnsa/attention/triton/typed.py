"""The parts of Triton that this package uses, with the types that Triton lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar, overload

F = TypeVar("F", bound=Callable[..., object])


class Kernel(Protocol):
    """``kernel[grid](*arguments)`` runs one program for each point of the grid."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


if TYPE_CHECKING:

    @overload
    def jit(function: F, /) -> F: ...
    @overload
    def jit(*, do_not_specialize: list[str]) -> Callable[[Callable[..., object]], Kernel]: ...
    def jit(*arguments: object, **options: object) -> object:
        """Compile a function that kernels call or, with ``do_not_specialize``, a kernel."""
else:
    from triton import jit as jit


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which accepts CPU tensors."""
    from triton import knobs  # pyright: ignore[reportMissingTypeStubs]

    return knobs.runtime.interpret
