"""Ranges of layers: all, none, a range or every n-th, in words that a command line can hold."""

from __future__ import annotations

import re
from typing import Any

from flexnsa.primitives import describe

_RANGE, _EVERY = re.compile(r"(\d{1,9}):(\d{1,9})"), re.compile(r"every:([1-9]\d{0,8})")


def layer_range(name: str, value: Any, num_layers: int) -> range:
    """Return the layers that ``value`` selects, counted from 0.

    Args:
        name: name of the argument, for errors.
        value: ``"all"`` or True, ``"none"`` or False, ``"0:6"`` or ``(0, 6)`` for 0 to 5, ``"every:2"`` for 0, 2, 4 ...
        num_layers: number of layers of the model.

    Raises:
        TypeError: the value is of another kind.
        ValueError: it is none of these, or exceeds the layers.
    """
    found = _read(value, num_layers)
    if found is None or not 0 <= found.start <= found.stop <= num_layers:
        expected = f"expected 'none', 'all', 'every:2' or a range such as '0:1', within 0..{num_layers}"
        kind = ValueError if isinstance(value, str | tuple) else TypeError
        raise kind(f"{name}: {expected}, got {describe(value)}")
    return found


def _read(value: Any, num_layers: int) -> range | None:
    if value in ("all", "none") or isinstance(value, bool):
        return range(num_layers if value in ("all", True) else 0)
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int) for end in value):
        return range(*value)
    if isinstance(value, str) and (ends := _RANGE.fullmatch(value)):
        return range(int(ends[1]), int(ends[2]))
    if isinstance(value, str) and (every := _EVERY.fullmatch(value)):
        return range(0, num_layers, int(every[1]))
    return None
