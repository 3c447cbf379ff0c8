"""Branches compile themselves, once for all lengths, unless their caller is compiling already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

MAX_VARIANTS = 64
"""Of one branch in one process: architectures, devices, dtypes, mods."""

P = ParamSpec("P")
T = TypeVar("T")


def compile_once(branch: Callable[P, T], *, each_length: bool = False) -> Callable[P, T]:
    """Compile a function of ``q, k, v`` and more, unless a compiler is at work already.

    FlexAttention must never run uncompiled: it then computes every score, and applies the mask function to tiles that
    were not selected. ``fullgraph`` makes that an error instead.

    Args:
        branch: the function.
        each_length: whether to compile anew for every length.
    """
    return branch if torch.compiler.is_compiling() else functools.partial(_call_compiled, branch, each_length)


def _call_compiled(branch: Callable[P, T], each_length: bool, *args: P.args, **kwargs: P.kwargs) -> T:
    # Not at the top: to import this package is not to import a compiler.
    from torch import _dynamo  # pyright: ignore[reportPrivateUsage]

    # Batch and lengths may vary from call to call. Heads, head dimensions and block sizes are architecture: tiles are
    # chosen from them, so each choice is compiled anew, and so is each mod: more variants than a compiler expects.
    # The first length is compiled for itself, which is fastest; the next few show the compiler what varies.
    for x in args[:3]:
        if isinstance(x, Tensor) and x.dim() == 4:
            _dynamo.mark_static(x, 1)
            _dynamo.mark_static(x, 3)
    options = {"specialize_int": True, "specialize_float": True, "recompile_limit": MAX_VARIANTS}
    with _dynamo.config.patch(options):  # pyright: ignore[reportUnknownMemberType]
        compiled = compile_for_each_length(branch) if each_length else compile_branch(branch)
        return compiled(*args, **kwargs)


@functools.cache
def compile_branch(branch: Callable[P, T]) -> Callable[P, T]:
    """Compile the function, in one graph; the same one for every caller."""
    return torch.compile(branch, fullgraph=True)  # pyright: ignore[reportUnknownMemberType]


@functools.cache
def compile_for_each_length(branch: Callable[P, T]) -> Callable[P, T]:
    """As :func:`compile_branch`, anew for every length; more than :data:`MAX_VARIANTS` are an error."""
    return torch.compile(branch, fullgraph=True, dynamic=False)  # pyright: ignore[reportUnknownMemberType]
