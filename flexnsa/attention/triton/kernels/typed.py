"""The parts of Triton that this package uses, with the types that Triton lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, overload

from flexnsa.attention.triton.kernels.kernel import Kernel

F = TypeVar("F", bound=Callable[..., object])


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


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which accepts CPU tensors."""
    from triton import knobs  # pyright: ignore[reportMissingTypeStubs]

    return knobs.runtime.interpret
