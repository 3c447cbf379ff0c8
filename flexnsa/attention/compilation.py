"""Compilation of branches, once for all lengths, unless the caller is compiling already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

MAX_VARIANTS = 64
"""Limit of the compiled variants of a branch in one process: architectures, devices, dtypes, mods."""

P = ParamSpec("P")
T = TypeVar("T")


def compile_once(branch: Callable[P, T], *, each_length: bool = False) -> Callable[P, T]:
    """Compile a function of ``q, k, v`` and more, unless it is being compiled already.

    FlexAttention must never run uncompiled: it would compute every score, and apply the mask function to tiles that
    were not selected. ``fullgraph`` turns that into an error.

    Args:
        branch: the function.
        each_length: whether to compile again for every length.
    """
    return branch if torch.compiler.is_compiling() else functools.partial(_call_compiled, branch, each_length)


def _call_compiled(branch: Callable[P, T], each_length: bool, *args: P.args, **kwargs: P.kwargs) -> T:
    # Imported here, so that importing the package does not import the compiler.
    from torch import _dynamo  # pyright: ignore[reportPrivateUsage]

    # Batch and lengths may vary between calls. Heads, head dimensions and block sizes decide the tiles, so each choice
    # is compiled separately, and so is each mod: more variants than the default limit of recompilations. The first
    # length is compiled as a constant, which is fastest; from the next ones the compiler learns which sizes vary.
    for x in args[:3]:
        if isinstance(x, Tensor) and x.dim() == 4:
            _dynamo.mark_static(x, 1)
            _dynamo.mark_static(x, 3)
    options = {"specialize_int": True, "specialize_float": True, "recompile_limit": MAX_VARIANTS}
    with _dynamo.config.patch(options):  # pyright: ignore[reportUnknownMemberType]
        return compile_branch(branch, dynamic=False if each_length else None)(*args, **kwargs)


@functools.cache
def compile_branch(branch: Callable[P, T], *, dynamic: bool | None) -> Callable[P, T]:
    """Compile a function once for all callers, in one graph, or with ``dynamic=False`` in one for each length.

    More than :data:`MAX_VARIANTS` lengths raise an error.
    """
    return torch.compile(branch, fullgraph=True, dynamic=dynamic)  # pyright: ignore[reportUnknownMemberType]
