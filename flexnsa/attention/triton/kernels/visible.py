# pyright: standard, reportGeneralTypeIssues=false
"""What a query sees, as a kernel computes it from its position."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.typed import jit


@jit
def count_visible(token_ptrs, start_ptrs, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Count the compressed tokens of its own document that each query sees: those with ``i * d + l - 1 <= t``."""
    age = tl.load(token_ptrs) - tl.load(start_ptrs)
    return tl.maximum(age + 1 + STRIDE - LENGTH, 0) // STRIDE
