"""Which rows of a cache: a number, several, or a tensor of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from flexnsa.validation import LARGEST_SIZE, check_int, check_integers, may_look

Rows = int | Sequence[int] | Tensor
"""A row, several, or an int tensor ``(K,)`` of them on the device of the cache."""


def row_index(name: str, rows: Any, existing: Tensor, *, distinct: bool = False) -> Tensor:
    """Give rows as int64 ``(K,)``, without waiting for the device.

    Args:
        name: of the argument.
        rows: what was given for it.
        existing: int64 ``(B,)``, the numbers of the rows that there are.
        distinct: whether each may come once only.

    Raises:
        TypeError: neither a row, nor several, nor a tensor.
        ValueError: a row that there is not, or that comes again; in a tensor, this is seen on a CPU.
    """
    if isinstance(rows, Tensor):
        check_integers(name, rows, ("K",), like=existing, as_of="the cache")
        numbers: Sequence[int] = rows.tolist() if may_look(rows) else ()
    else:
        several = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
        numbers = cast("Sequence[int]", rows if several else (rows,))
        for row in numbers:
            check_int(name, row, -LARGEST_SIZE)
    if not all(0 <= row < len(existing) for row in numbers):
        raise ValueError(f"{name}: expected 0 .. {len(existing) - 1}, got {list(numbers)}")
    if distinct and len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}: expected each row once, got {list(numbers)}")
    if isinstance(rows, Tensor):
        return rows.to(torch.int64)
    # Of numbers that lie on the device already: to send it some would wait for it.
    return torch.cat([existing[:0], *(existing[row : row + 1] for row in numbers)])
