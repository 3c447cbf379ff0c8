"""Dense branches are intervals: the keys that a query sees are ``[lo, hi)``, and both bounds never decrease."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Intervals:
    """Visible keys ``[lo, hi)`` of each query, int32 ``(B or 1, T)``; an empty interval has ``hi <= lo``."""

    lo: Tensor
    hi: Tensor
