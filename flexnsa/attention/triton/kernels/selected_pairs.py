# pyright: standard, reportGeneralTypeIssues=false
"""What the kernels of the selected branch know of pairs, bins and tiles; :mod:`selected_lists` says what these are."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.typed import jit


@jit
def load_positions(token_ptr, start_ptr, t, num_queries, HAS_POSITIONS: tl.constexpr):
    """Token and first key of the document of the queries ``t``, of which some may be beyond the last."""
    if HAS_POSITIONS:
        t = tl.minimum(t, num_queries - 1)
        token = tl.load(token_ptr + t)
        start = tl.load(start_ptr + t)
    else:
        token = t
        start = t * 0
    return token, start


@jit
def locate(block, token, start, num_keys, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """First key and bin of a selected block, and whether its query can see any of it; any int is a safe block."""
    seen = (block >= 0) & (token >= start) & (block <= (token - start) // SIZE)
    first = start + tl.where(seen, block, 0) * SIZE
    seen = seen & (first < num_keys)
    if HAS_POSITIONS:
        seen = seen & (first + SIZE > 0)
        shifted = tl.where(seen, first, 0) + SIZE  # a block may begin before key 0: runs count from the one before
        last = tl.minimum(shifted + SIZE - 1, token + SIZE)
        bin_id = 2 * (shifted // SIZE) + (last // SIZE != shifted // SIZE).to(tl.int32)
    else:
        bin_id = block
    return first, bin_id, seen


@jit
def first_key(
    bin_id, pair, idx_ptr, token_ptr, start_ptr, t0, num_keys,
    n: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """First key of a bin: of its run, or of the block that crosses it, as one ``pair`` of the chunk selected it."""
    if HAS_POSITIONS:
        t = t0 + pair // n
        block = tl.load(idx_ptr + pair)
        crossing, _, _ = locate(block, tl.load(token_ptr + t), tl.load(start_ptr + t), num_keys, SIZE, HAS_POSITIONS)
        first = tl.where(bin_id % 2 == 1, crossing, (bin_id // 2 - 1) * SIZE)
    else:
        first = bin_id * SIZE
    return first


@jit
def needs_mask(
    order_ptr, token_ptr, t0, first, num_keys,
    n: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """How many of a list's first queries may not see the whole tile of keys: they come in order, each once.

    A query behind the tile's last key sees all of it: a document that begins inside a run has left it by then.
    """
    t = t0 + tl.load(order_ptr) // n
    count = first + SIZE - tl.load(token_ptr + t) if HAS_POSITIONS else first + SIZE - 1 - t
    return tl.where((BN > SIZE) | (first < 0) | (first + BN > num_keys), 2147483647, count)


@jit
def row_of_tile(i, r, QUERIES: tl.constexpr, SPREAD: tl.constexpr, G: tl.constexpr):
    """Index in the list, head in the group, and whether there is such a head, of row ``r`` of tile ``i`` of a list.

    A thread holds every eighth row or so: with the query as the faster index these are few queries, and few registers.
    """
    HEADS: tl.constexpr = (G + SPREAD - 1) // SPREAD
    head = i % SPREAD * HEADS + r // QUERIES
    return i // SPREAD * QUERIES + r % QUERIES, tl.minimum(head, G - 1), (r // QUERIES < HEADS) & (head < G)


@jit
def sees(
    pair, key, idx_ptr, token_ptr, start_ptr, t0, n: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr
):  # fmt: skip
    """Which keys the query of each pair sees, ``(pairs, keys)``; a key that does not exist has the largest int."""
    t = t0 + pair // n
    if HAS_POSITIONS:
        lowest = tl.load(start_ptr + t) + tl.load(idx_ptr + pair) * SIZE
        seen = (key[None, :] <= tl.load(token_ptr + t)[:, None]) & (key[None, :] >= lowest[:, None])
    else:
        seen = key[None, :] <= t[:, None]
    return seen


@jit
def has_parity(bin_id, parity, HAS_POSITIONS: tl.constexpr):
    """Whether a bin's turn has come to add to the sums of its keys.

    Runs share no keys, and neither do boundaries, up to the last key that is seen; but a run and a boundary do.
    """
    return bin_id % 2 == parity if HAS_POSITIONS else bin_id >= 0


@jit
def load_row(row, column, WIDTH: tl.constexpr, END: tl.constexpr):
    """Load the columns below ``WIDTH`` of rows, without a mask if those asked for end before."""
    return tl.load(row + column) if END <= WIDTH else tl.load(row + column, mask=column < WIDTH, other=0.0)
