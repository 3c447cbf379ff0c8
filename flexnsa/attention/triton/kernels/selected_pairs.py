# pyright: standard, reportGeneralTypeIssues=false
"""Functions of pairs, key tiles and replicas for the kernels of the selected branch; see :mod:`selected_lists`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit


@jit
def locate(block, token, start, num_keys, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """Return first key and key tile of a selected block, and whether its query sees any of it; any int is safe."""
    seen = (block >= 0) & (token >= start) & (block <= (token - start) // SIZE)
    first = start + tl.where(seen, block, 0) * SIZE
    seen = seen & (first < num_keys)
    if HAS_POSITIONS:
        seen = seen & (first + SIZE > 0)
        shifted = tl.where(seen, first, 0) + SIZE  # a block may start before key 0, so runs count from -1
        last = tl.minimum(shifted + SIZE - 1, token + SIZE)
        tile_id = 2 * (shifted // SIZE) + (last // SIZE != shifted // SIZE).to(tl.int32)
    else:
        tile_id = block
    return first, tile_id, seen


@jit
def first_key(
    tile_id, pair, idx_ptr, token_ptr, start_ptr, t0, num_keys,
    n: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return the first key of a key tile: of its run, or of the crossing block that a ``pair`` of it selected."""
    if HAS_POSITIONS:
        t = t0 + pair // n
        block = tl.load(idx_ptr + pair)
        crossing, _, _ = locate(block, tl.load(token_ptr + t), tl.load(start_ptr + t), num_keys, SIZE, HAS_POSITIONS)
        first = tl.where(tile_id % 2 == 1, crossing, (tile_id // 2 - 1) * SIZE)
    else:
        first = tile_id * SIZE
    return first


@jit
def needs_mask(
    order_ptr, token_ptr, t0, first, num_keys,
    n: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return how many queries, first in the list, may not see the whole key tile; queries are ascending and unique.

    A query after the tile's last key sees all of it: if its document starts inside the run, it uses another key tile.
    """
    t = t0 + tl.load(order_ptr) // n
    count = first + SIZE - tl.load(token_ptr + t) if HAS_POSITIONS else first + SIZE - 1 - t
    return tl.where((BN > SIZE) | (first < 0) | (first + BN > num_keys), 2147483647, count)


@jit
def row_of_tile(i, r, QUERIES: tl.constexpr, SPREAD: tl.constexpr, G: tl.constexpr):
    """Return index in the list, head in the group, and whether that head exists, for row ``r`` of tile ``i`` of a list.

    A thread holds about every eighth row. With the query as the faster index these are few queries, in few registers.
    """
    HEADS: tl.constexpr = (G + SPREAD - 1) // SPREAD
    head = i % SPREAD * HEADS + r // QUERIES
    return i // SPREAD * QUERIES + r % QUERIES, tl.minimum(head, G - 1), (r // QUERIES < HEADS) & (head < G)


@jit
def sees(
    pair, key, idx_ptr, token_ptr, start_ptr, t0, n: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr
):  # fmt: skip
    """Return which keys the query of each pair sees, ``(pairs, keys)``; a missing key is the largest int."""
    t = t0 + pair // n
    if HAS_POSITIONS:
        lowest = tl.load(start_ptr + t) + tl.load(idx_ptr + pair) * SIZE
        seen = (key[None, :] <= tl.load(token_ptr + t)[:, None]) & (key[None, :] >= lowest[:, None])
    else:
        seen = key[None, :] <= t[:, None]
    return seen


@jit
def has_parity(tile_id, parity, HAS_POSITIONS: tl.constexpr):
    """Return whether a key tile may add to the gradients of its keys in this launch.

    Key tiles of runs share no keys, nor do those of boundaries up to the last key that is seen. But the two kinds
    overlap, so each kind has its own launch.
    """
    return tile_id % 2 == parity if HAS_POSITIONS else tile_id >= 0


@jit
def load_row(row, column, WIDTH: tl.constexpr, END: tl.constexpr):
    """Load the columns below ``WIDTH`` of rows, without a mask if all columns up to ``END`` are."""
    return tl.load(row + column) if END <= WIDTH else tl.load(row + column, mask=column < WIDTH, other=0.0)
