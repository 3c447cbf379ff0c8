"""Answers to wrong calls: each names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def describe(value: object) -> str:
    """Show a value as it matters in an error: tensors by shape, dtype and device."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_type(name: str, value: object, expected: type) -> None:
    """Demand an instance of a class."""
    if not isinstance(value, expected):
        raise TypeError(f"{name}: expected {expected.__name__}, got {describe(value)}")


def check_positive_int(name: str, value: object) -> None:
    """Demand a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


def check_positive_number(name: str, value: object) -> None:
    """Demand a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {describe(value)}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a positive, finite number, got {value}")


def check_seed(name: str, value: object) -> None:
    """Demand a number that seeds PyTorch's generators."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {describe(value)}")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name}: expected an int from -2**63 to 2**64 - 1, got {value}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Demand one of a few words."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_tensor(
    name: str, value: Any, shape: Sequence[int | str], *, like: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Demand a tensor of a shape, where a word stands for any size: ``("B", 2, "S", 64)``.

    ``like`` also fixes the device and, unless ``dtype`` does, the dtype; with neither it must be a floating dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {_show(shape)}, got {describe(value)}")
    sizes_fit = len(value.shape) == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, value.shape, strict=True)
    )
    if not sizes_fit:
        raise ValueError(f"{name}: expected shape {_show(shape)}, got {tuple(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name}: expected device {like.device}, as q has, got {value.device}")
    wanted = dtype if dtype is not None or like is None else like.dtype
    if wanted is not None and value.dtype != wanted:
        raise ValueError(f"{name}: expected dtype {wanted}, got {value.dtype}")
    if wanted is None:
        check_floating(name, value)


def check_floating(name: str, value: Tensor) -> None:
    """Demand a floating dtype."""
    if not value.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating dtype, got {value.dtype}")


def _show(shape: Sequence[int | str]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
