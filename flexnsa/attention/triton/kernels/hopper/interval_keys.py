# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Which keys the queries of a tile see, without positions.

Neither end of the interval decreases along the queries: the first and the last query of a tile tell which keys some of
its queries see, and which all of them see.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from flexnsa.attention.triton.kernels.gluon import gluon_jit


@gluon_jit
def place(LONGEST_LAST: gl.constexpr, WINDOW: gl.constexpr):
    """Return the tile of a program, and its batch element and heads; without a window the longest tiles come first."""
    tile = gl.program_id(0)
    heads = gl.program_id(1)
    if WINDOW == 0:
        number = heads * gl.num_programs(0) + tile
        tile = number // gl.num_programs(1)
        heads = number % gl.num_programs(1)
        if LONGEST_LAST:
            tile = gl.num_programs(0) - 1 - tile
    return tile, heads.to(gl.int64)


@gluon_jit
def keys_of(row, num_keys, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr):
    """Return the keys ``low .. high - 1`` that queries see, as ``keys_of`` of ``kernels/intervals.py`` does."""
    high = gl.minimum(count_visible(row, LENGTH, STRIDE), num_keys)
    low = row * 0
    if WINDOW > 0:
        low = gl.maximum(row - (WINDOW - 1), 0)
    return low, high


@gluon_jit
def count_visible(row, LENGTH: gl.constexpr, STRIDE: gl.constexpr):
    """Return how many compressed tokens a query sees."""
    return gl.maximum(row + (1 + STRIDE - LENGTH), 0) // STRIDE
