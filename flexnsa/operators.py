"""How this package makes an operator that the compiler does not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def opaque_operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors and numbers as ``flexnsa::name``; it mutates nothing.

    Autocast stops at its door: inside, precision is chosen by the function alone.
    """

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def without_autocast(*args: Any) -> Any:
            with torch.autocast(args[0].device.type, enabled=False):
                return function(*args)

        schema = torch.library.infer_schema(function, mutates_args=())
        return torch.library.custom_op(f"flexnsa::{name}", without_autocast, mutates_args=(), schema=schema)

    return register
