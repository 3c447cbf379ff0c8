"""What a right call is, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

IDS = torch.tensor([[0] * 7 + [1] * 13, [3] * 20])
"""Documents of two rows of 20 tokens."""

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "v_head_dim": 6}


@dataclass
class Call:
    """A right call.

    Args:
        function: called with the arguments by name.
        arguments: a right value of each; a copy is made for every call.
        expected: what the result must be, where that is not the type's own concern.
        optional: arguments that may be None.
        state: makes what the function works on; passed by position.
        also: names that an error may begin with beside those of the arguments.
        errors: what it may raise beside TypeError and ValueError.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    expected: Callable[[Any, dict[str, Any]], bool] = lambda result, arguments: True  # noqa: ARG005
    optional: tuple[str, ...] = ()
    state: Callable[[], Any] | None = None
    also: tuple[str, ...] = ()
    errors: tuple[type[Exception], ...] = ()


def shift(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.1


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < 9


def config_fields(cls: Any) -> dict[str, Any]:
    instance = cls()
    return {f.name: getattr(instance, f.name) for f in fields(cls)}
