# pyright: standard, reportGeneralTypeIssues=false
"""Functions of pairs, key tiles and replicas for the kernels of the selected branch; see :mod:`selected_lists`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.kernel import jit

OF_CHUNK = ["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index"]
OF_REPLICAS = ["num_chunks", "num_replicas", "num_shared", "parity"]
"""Numbers for whose values no kernel is compiled anew."""


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
def first_key(tile_id, pair, where, n: tl.constexpr, SIZE: tl.constexpr):
    """Return the first key of a key tile, which may be before key 0: of its run, or of the crossing block of a pair.

    ``where`` is None for one whole sequence, which has code of its own. Else it has pointers to blocks of pairs, to the
    token of each query and the first token of its document, and in these the place of the first query of the list.
    """
    first = tile_id * SIZE
    if where is not None:
        crossing, _ = keys_of_pair(pair, where, n, SIZE)
        first = tl.where(tile_id % 2 == 1, crossing, first // 2 - SIZE)
    return first


@jit
def count_masked(first, order_ptr, where, t0, n: tl.constexpr, SIZE: tl.constexpr):
    """Return how many queries, first in the list, may not see all keys of a tile; queries are ascending and unique.

    A query after the tile's last key sees all of it: if its document starts inside the run, it uses another key tile.
    """
    count = first + SIZE - 1 - t0 - tl.load(order_ptr) // n
    if where is not None:
        _, token = keys_of_pair(tl.load(order_ptr), where, n, SIZE)
        count = first + SIZE - token
    return count


@jit
def keys_of_pair(pair, where, n: tl.constexpr, SIZE: tl.constexpr):
    """Return the first key of a pair's block, and the token of its query: the last key that this may see."""
    idx_ptr, token_ptr, start_ptr, first = where
    at = first + pair // n
    return tl.load(start_ptr + at) + tl.load(idx_ptr + pair) * SIZE, tl.load(token_ptr + at)


@jit
def row_of_tile(i, r, QUERIES: tl.constexpr, SPREAD: tl.constexpr, G: tl.constexpr):
    """Return index in the list, head in the group, and whether that head exists, for row ``r`` of tile ``i`` of a list.

    A thread holds about every eighth row. With the query as the faster index these are few queries, in few registers.
    """
    HEADS: tl.constexpr = (G + SPREAD - 1) // SPREAD
    head = i % SPREAD * HEADS + r // QUERIES
    return i // SPREAD * QUERIES + r % QUERIES, tl.minimum(head, G - 1), (r // QUERIES < HEADS) & (head < G)


@jit
def sees(pair, key, where, t0, n: tl.constexpr, SIZE: tl.constexpr):
    """Return which keys the query of each pair sees, ``(pairs, keys)``; a missing key is the largest int."""
    if where is None:
        seen = key[None, :] <= (t0 + pair // n)[:, None]
    else:
        lowest, token = keys_of_pair(pair, where, n, SIZE)
        seen = (key[None, :] <= token[:, None]) & (key[None, :] >= lowest[:, None])
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
