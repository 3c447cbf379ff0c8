# pyright: standard, reportGeneralTypeIssues=false
"""The keys that queries see: their positions, compressed tokens, and the runs of keys that a tile of them shares."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit


@jit
def load_positions(token_ptr, start_ptr, t, num_queries, HAS_POSITIONS: tl.constexpr):
    """Return the token, and the first key of the document, of the queries ``t``; some may exceed the last query."""
    if HAS_POSITIONS:
        t = tl.minimum(t, num_queries - 1)
        token = tl.load(token_ptr + t)
        start = tl.load(start_ptr + t)
    else:
        token = t
        start = t * 0
    return token, start


@jit
def count_visible(age, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Return how many compressed tokens a query sees, ``age`` tokens into its document: ``i * d + l - 1 <= age``."""
    return tl.maximum(age + (1 + STRIDE - LENGTH), 0) // STRIDE


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
