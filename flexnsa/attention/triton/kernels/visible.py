# pyright: standard, reportArgumentType=false, reportGeneralTypeIssues=false
"""The keys that queries see: positions, compressed tokens, the runs of keys that a tile shares, and capped scores."""

from __future__ import annotations

import triton.language as tl
from triton import knobs

from flexnsa.attention.triton.kernels.kernel import jit

INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@jit
def place_in_scores(num_rows, width, BT: tl.constexpr, BJ):
    """Return the first row and the first block that a program scores, and its batch element and head."""
    tiles_t, tiles_j = (num_rows + BT - 1) // BT, (width + BJ - 1) // BJ
    tile = tl.program_id(0)
    return tile // tiles_j % tiles_t * BT, tile % tiles_j * BJ, (tile // tiles_j // tiles_t).to(tl.int64)


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


@jit
def capped(x, INNER: tl.constexpr, DTYPE: tl.constexpr = tl.bfloat16):
    """Return ``tanh(INNER * x)`` of products of numbers of a dtype; without a soft cap, where it is 0, the products.

    The hardware's has a relative error of 2^-11. The exact one is Cephes' polynomial near 0, where ``1 - 1`` rounds.
    """
    if INNER != 0.0:
        x *= INNER
        if INTERPRETED or tl.float32 == DTYPE:
            square = x * x
            near = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
            near = ((near * square + 1.33314422036e-1) * square - 3.33332819422e-1) * square * x + x
            x = tl.where(square < 0.4, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))
        else:
            x = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return x


@jit
def through_cap(p, s, INNER: tl.constexpr):
    """Return p times the derivative of the tanh ``s`` that :func:`capped` returned."""
    return p * (1.0 - s * s) if INNER != 0.0 else p
