"""Checks of one value; an error reads ``argument: expected ..., got ...``."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST_SIZE = 2**30
"""Limit of every count and size: positions are int32, and sizes are added to them."""

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def describe(value: object) -> str:
    """Describe a value for an error: a tensor by shape, dtype and device, a long value shortened."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return f"a nested tensor of {value.dtype} on {value.device}"
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def check_type(name: str, value: object, expected: type) -> None:
    """Check that a value is an instance of a class."""
    if not isinstance(value, expected):
        raise TypeError(f"{name}: expected {expected.__name__}, got {describe(value)}")


def check_int(name: str, value: Any, least: int, most: int = LARGEST_SIZE) -> None:
    """Check that a value is an int in ``[least, most]``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {describe(value)}")
    if value > most:
        raise ValueError(f"{name}: expected at most {most}, got {describe(value)}")


def check_int64(name: str, value: Any, like: Tensor | None = None) -> None:
    """Check that a value is an int of 64 bits, or an integer tensor ``()``."""
    if isinstance(value, Tensor):
        check_integers(name, value, (), like=like)
    else:
        check_int(name, value, -(2**63), 2**63 - 1)


def check_positive_int(name: str, value: Any) -> None:
    """Check that a value is an int above 0."""
    check_int(name, value, 1)


def check_head_counts(num_heads: Any, num_kv_heads: Any) -> None:
    """Check that the numbers of heads fit each other."""
    check_positive_int("num_heads", num_heads)
    check_positive_int("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")


def check_heads(num_heads: Any, num_kv_heads: Any, head_dim: Any, v_head_dim: Any) -> None:
    """Check that the numbers and sizes of heads fit each other."""
    check_head_counts(num_heads, num_kv_heads)
    check_positive_int("head_dim", head_dim)
    check_positive_int("v_head_dim", v_head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number, because RoPE rotates pairs, got {head_dim}")


def check_number(name: str, value: Any) -> None:
    """Check that a value is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not abs(value) <= _LARGEST_FLOAT:
        raise ValueError(f"{name}: expected a finite number, got {describe(value)}")


def check_positive_number(name: str, value: Any) -> None:
    """Check that a value is a finite number above 0."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name}: expected a positive, finite number, got {describe(value)}")


def check_seed(name: str, value: Any) -> None:
    """Check that a value can seed PyTorch's generators."""
    check_int(name, value, -(2**63), 2**64 - 1)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that a value is one of some strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {describe(value)}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_device(name: str, value: Any) -> None:
    """Check that a value is a device of this machine, or None."""
    if not isinstance(value, torch.device | str | None):
        raise TypeError(f"{name}: expected a device, got {describe(value)}")
    try:
        torch.empty(0, device=value)
    except Exception as error:  # the class depends on what is missing
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name}: expected a device of this machine, got {describe(value)}: {reason}") from error


def check_dtype(name: str, value: Any) -> None:
    """Check that a value is a floating dtype of 16 bits or more, or None."""
    if not isinstance(value, torch.dtype | None):
        raise TypeError(f"{name}: expected a dtype, got {describe(value)}")
    if value is not None and value not in FLOATING:
        raise ValueError(f"{name}: expected a floating dtype of 16 bits or more, got {value}")


def check_tensor(
    name: str,
    value: Any,
    shape: Sequence[int | str],
    *,
    like: Tensor | None = None,
    as_of: str = "q",
    dtype: torch.dtype | None = None,
) -> None:
    """Check that a value is a dense tensor of a shape, in which a string stands for any size: ``("B", 2, "S", 64)``.

    The device must be that of ``like``, the argument named ``as_of``. The dtype must be ``dtype``, or else that of
    ``like``, or else floating.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {_show(shape)}, got {describe(value)}")
    if not is_dense(value):
        raise ValueError(f"{name}: expected a dense tensor {_show(shape)}, got {describe(value)}, {value.layout}")
    sizes_fit = len(value.shape) == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, value.shape, strict=True)
    )
    if not sizes_fit:
        raise ValueError(f"{name}: expected shape {_show(shape)}, got {tuple(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, as {as_of} has, got {value.device}")
    expected = dtype if dtype is not None or like is None else like.dtype
    if expected is not None and value.dtype != expected:
        raise ValueError(f"{name}: expected dtype {expected}, got {value.dtype}")
    if expected is None:
        check_floating(name, value)


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor nested."""
    return not x.is_nested and x.layout == torch.strided


def check_floating(name: str, value: Tensor) -> None:
    """Check that a tensor has a floating dtype of 16 bits or more."""
    if value.dtype not in FLOATING:
        raise ValueError(f"{name}: expected a floating dtype of 16 bits or more, got {value.dtype}")


def check_like_weight(name: str, x: Any, shape: Sequence[int | str], weight: Tensor) -> None:
    """Check that x has a shape, and the device and dtype of ``weight``, unless autocast casts it."""
    autocast = isinstance(x, Tensor) and not x.is_meta and torch.is_autocast_enabled(x.device.type)
    dtype = x.dtype if autocast and x.dtype in FLOATING[1:] else weight.dtype  # autocast does not cast float64
    check_tensor(name, x, shape, like=weight, as_of="the layer", dtype=dtype)


def check_layer_input(x: Any, dim: int, weight: Tensor) -> None:
    """Check that a layer's input is ``(B, S, dim)``, not empty, and fits the device and dtype of ``weight``."""
    check_like_weight("x", x, ("B", "S", dim), weight)
    if 0 in x.shape:
        raise ValueError(f"x: expected no empty dimension, got {tuple(x.shape)}")


def check_integers(
    name: str, value: Any, shape: Sequence[int | str], *, like: Tensor | None = None, as_of: str = "q"
) -> None:
    """Check that a value is an int32 or int64 tensor of a shape; see :func:`check_tensor`."""
    check_tensor(name, value, shape, like=like, as_of=as_of, dtype=getattr(value, "dtype", None))
    if value.dtype not in INTEGERS:
        raise ValueError(f"{name}: expected dtype torch.int32 or torch.int64, got {value.dtype}")


def check_tokens(name: str, tokens: Any, embedding: Tensor) -> None:
    """Check that tokens are int ``(B, S)``, not empty, and each a row of ``embedding``."""
    check_integers(name, tokens, ("B", "S"), like=embedding, as_of="the model")
    if 0 in tokens.shape:
        raise ValueError(f"{name}: expected no empty dimension, got {tuple(tokens.shape)}")
    if may_look(tokens) and not ((tokens >= 0) & (tokens < len(embedding))).all():
        raise ValueError(f"{name}: expected 0 .. {len(embedding) - 1}, got {tokens.min()} .. {tokens.max()}")


def check_lengths(lengths: Any, x: Tensor, *, least: int = 0) -> None:
    """Check that lengths are int ``(B,)`` in ``[least, S]``: how many tokens of each sequence of ``x (B, S, ...)``."""
    check_integers("lengths", lengths, (len(x),), like=x, as_of="x")
    if may_look(lengths) and not ((lengths >= least) & (lengths <= x.shape[1])).all():
        raise ValueError(f"lengths: expected {least} .. {x.shape[1]}, the tokens of x, got {lengths.tolist()}")


def check_has_values(name: str, value: Tensor) -> None:
    """Check that a tensor holds values; one on the meta device does not."""
    if value.is_meta:
        raise ValueError(f"{name}: expected a device that holds values, got {describe(value)}")


def is_exporting() -> bool:
    """Return whether an exporter traces."""
    return torch.compiler.is_exporting()


# Dynamo asks once and takes the answer for a constant: that of torch 2.11 would take every compilation for an export.
is_exporting._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def may_look(x: Tensor) -> bool:
    """Return whether reading values needs no synchronisation: on a CPU, outside ``torch.compile``."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _show(shape: Sequence[int | str]) -> str:
    """Format a shape as Python formats a tuple: ``(B, 2)``, ``(B,)``."""
    return "(" + ", ".join(map(str, shape)) + (",)" if len(shape) == 1 else ")")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_LARGEST_FLOAT = torch.finfo(torch.float64).max
