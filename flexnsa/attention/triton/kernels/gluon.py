"""The parts of Gluon that kernels for Hopper use, with the types that it lacks and one name for each.

Gluon is Triton with layouts, shared memory and asynchronous products by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from flexnsa.attention.triton.kernels.kernel import Kernel, jit

F = TypeVar("F", bound=Callable[..., object])

if TYPE_CHECKING:
    gluon_jit = jit

    def gluon_constant(function: F, /) -> F:
        """Let kernels call a function of constants, such as one that returns a layout, when they are compiled."""
        ...

    def barrier() -> None:
        """Wait for all threads of the program."""

    def async_load(smem: object, pointer: object, mask: object = None) -> None:
        """Begin to copy global memory to shared memory."""
else:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    gluon_constant = gluon.constexpr_function
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the name in Triton 3.6

    until_3_7 = "async_copy_global_to_shared"
    async_load = async_copy.async_load if hasattr(async_copy, "async_load") else getattr(async_copy, until_3_7)

    def gluon_jit(*arguments, **options):  # noqa: D103
        return gluon.jit(*arguments) if arguments else lambda function: Kernel(gluon.jit(**options)(function))
