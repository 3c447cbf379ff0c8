# pyright: standard, reportGeneralTypeIssues=false
"""The keys that queries see: compressed tokens from positions, and the runs of keys that a tile of queries shares."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.typed import jit


@jit
def count_visible(token_ptrs, start_ptrs, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Return how many compressed tokens of its document each query sees: those with ``i * d + l - 1 <= t``."""
    age = tl.load(token_ptrs) - tl.load(start_ptrs)
    return tl.maximum(age + 1 + STRIDE - LENGTH, 0) // STRIDE


@jit
def runs(low, high, BN: tl.constexpr):
    """Split the keys ``begin .. end`` of a query tile: all of its rows see those from ``full`` to ``rest``.

    A row without keys does not extend the range, but then there is no key that all rows see.
    """
    some = high > low
    begin = tl.min(tl.where(some, low, 2147483647))
    end = tl.max(tl.where(some, high, 0))
    begin = tl.minimum(begin, end)
    full = begin + tl.cdiv(tl.max(low) - begin, BN) * BN
    full = tl.maximum(tl.minimum(full, begin + tl.cdiv(end - begin, BN) * BN), begin)
    rest = full + tl.maximum(tl.min(high) - full, 0) // BN * BN
    rest = tl.minimum(rest, tl.maximum(full, end))  # if no row has a key, high is meaningless
    return begin, full, rest, end
