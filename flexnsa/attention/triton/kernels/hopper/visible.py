# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Which keys the queries of a tile see, which queries see a key, and where key tiles of the selected branch begin.

Neither end of the interval of keys decreases along the queries: the first and the last query of a tile tell which keys
some of its queries see, and which all of them see. ``where`` is None for one whole sequence, which has code of its own.
Else it has pointers to each query's token, its document's first token and first key (in the selected branch, to blocks
of pairs, the token and the first token), and the offset of the batch element in these tables.
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
def keys_of(
    row, where, num_queries, num_keys, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Return the keys ``low .. high - 1`` that queries see, as ``keys_of`` of ``kernels/intervals.py`` does."""
    token = row
    start = row * 0
    first = row * 0
    if where is not None:
        token_ptr, start_ptr, first_ptr, at = where
        there = at + gl.minimum(row, num_queries - 1)
        token = gl.load(token_ptr + there)
        start = gl.load(start_ptr + there)
        first = gl.load(first_ptr + there)
    high = gl.minimum(first + count_visible(token - start, LENGTH, STRIDE), num_keys)
    low = gl.maximum(first, 0)
    if WINDOW > 0:
        low = gl.maximum(token - (WINDOW - 1), low)
    return low, high


@gluon_jit
def queries_of(
    key, where, num_queries, num_keys, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Return the queries ``begin .. end - 1`` that see keys, found by bisection; no key may be past the last one."""
    begin = key * 0
    end = key * 0
    size = num_queries
    while size > 0:
        half = (size + 1) // 2
        _, high = keys_of(begin + (half - 1), where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
        low, _ = keys_of(end + (half - 1), where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
        begin += gl.where(high > key, 0, half)
        end += gl.where(low > key, 0, half)
        size = size // 2
    return begin, end


@gluon_jit
def count_visible(row, LENGTH: gl.constexpr, STRIDE: gl.constexpr):
    """Return how many compressed tokens a query sees."""
    return gl.maximum(row + (1 + STRIDE - LENGTH), 0) // STRIDE


@gluon_jit
def capped(x, INNER: gl.constexpr):
    """Return ``tanh(INNER * x)`` of products, or without a soft cap these, as ``capped`` of ``kernels/visible.py``."""
    if INNER != 0.0:
        x = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * INNER], gl.float32, True, 1)
    return x


@gluon_jit
def through_cap(p, s, INNER: gl.constexpr):
    """Return p times the derivative of the tanh ``s`` that :func:`capped` returned."""
    return p * (1.0 - s * s) if INNER != 0.0 else p


@gluon_jit
def first_key(tile_id, order_ptr, where, n: gl.constexpr, SIZE: gl.constexpr):
    """Return where a key tile begins, which may be before key 0; ``order_ptr`` is one of its pairs."""
    first = tile_id * SIZE
    if where is not None:
        crossing, _ = keys_of_pair(gl.load(order_ptr), where, n, SIZE)
        first = gl.where(tile_id % 2 == 1, crossing, first // 2 - SIZE)
    return first


@gluon_jit
def count_masked(first, order_ptr, where, t0, n: gl.constexpr, SIZE: gl.constexpr):
    """Return how many queries, first in the list, may not see all keys of a tile; see ``needs_mask``."""
    count = first + SIZE - 1 - t0 - gl.load(order_ptr) // n
    if where is not None:
        _, token = keys_of_pair(gl.load(order_ptr), where, n, SIZE)
        count = first + SIZE - token
    return count


@gluon_jit
def keys_of_pair(pair, where, n: gl.constexpr, SIZE: gl.constexpr):
    """Return the first key of a pair's block, and the token of its query: the last key that this may see."""
    idx_ptr, token_ptr, start_ptr, first = where
    at = first + pair // n
    return gl.load(start_ptr + at) + gl.load(idx_ptr + pair) * SIZE, gl.load(token_ptr + at)
