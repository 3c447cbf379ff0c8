# pyright: standard, reportGeneralTypeIssues=false
"""The compressed tokens that a query sees, computed in a kernel from its position."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.typed import jit


@jit
def count_visible(token_ptrs, start_ptrs, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Return how many compressed tokens of its document each query sees: those with ``i * d + l - 1 <= t``."""
    age = tl.load(token_ptrs) - tl.load(start_ptrs)
    return tl.maximum(age + 1 + STRIDE - LENGTH, 0) // STRIDE
