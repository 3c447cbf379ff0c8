# pyright: standard, reportGeneralTypeIssues=false
"""A counting sort of pairs by key tile; see :mod:`flexnsa.attention.triton.selected_lists`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.selected_pairs import locate
from flexnsa.attention.triton.kernels.visible import load_positions
from flexnsa.attention.triton.typed import jit


@jit
def _tile_of_pairs(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return query in the chunk, slot, key tile, and whether it is listed, for a tile of pairs."""
    bh = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = (first_chunk + tl.program_id(1)) * chunk + query
    slot = tl.arange(0, NP)[None, :]
    inside = ((query < chunk) & (t < num_queries))[:, None] & (slot < n)
    block = tl.load(idx_ptr + (bh * num_queries + t)[:, None] * n + slot, mask=inside, other=-1)
    at = (bh // heads) * p_sb
    token, start = load_positions(token_ptr + at, start_ptr + at, t, num_queries, HAS_POSITIONS)
    _, tile_id, seen = locate(block, token[:, None], start[:, None], num_keys, SIZE, HAS_POSITIONS)
    return query[:, None], slot, tile_id, inside & seen


@jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "key_tiles"])
def mark(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, key_tiles,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Set the bit of every query in the words of its key tiles; the result does not depend on the order.

    All words of a program's queries are its own, so it clears them first.
    """
    query, _, tile_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, HAS_POSITIONS,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    word = (tl.program_id(0) * (QUERIES // 32) + tl.arange(0, QUERIES // 32))[:, None]
    for first in range(0, key_tiles, TILES):
        cleared = first + tl.arange(0, TILES)[None, :]
        at = marks_ptr + (table * words + word) * key_tiles + cleared
        tl.store(at, tl.zeros([QUERIES // 32, TILES], tl.int32), mask=(word < words) & (cleared < key_tiles))
    tl.debug_barrier()
    bit = tl.broadcast_to(1 << (query % 32), [QUERIES, NP])
    tl.atomic_or(marks_ptr + (table * words + query // 32) * key_tiles + tile_id, bit, mask=listed, sem="relaxed")


@jit
def _ones(x):
    """Return the number of set bits of each int."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@jit(do_not_specialize=["words", "key_tiles"])
def count_queries(marks_ptr, before_ptr, total_ptr, words, key_tiles, WORDS: tl.constexpr, TILES: tl.constexpr):
    """Count the queries of each key tile, and for each word those in the words before it."""
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tile_id = tl.program_id(0) * TILES + tl.arange(0, TILES)
    total = tl.zeros([TILES], tl.int32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        at = (table * words + word)[:, None] * key_tiles + tile_id[None, :]
        inside = (word < words)[:, None] & (tile_id < key_tiles)[None, :]
        count = _ones(tl.load(marks_ptr + at, mask=inside, other=0))
        tl.store(before_ptr + at, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(total_ptr + table * key_tiles + tile_id, total, mask=tile_id < key_tiles)


@jit(do_not_specialize=["first_chunk", "num_chunks", "num_replicas", "key_tiles", "capacity"])
def cut(
    total_ptr, begin_ptr, replicas_ptr, first_chunk, num_chunks, num_replicas, key_tiles, capacity, TILES: tl.constexpr
):  # fmt: skip
    """Compute the start of each key tile in the order, and split it into replicas."""
    table = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    chunk = (tl.program_id(1) * num_chunks + first_chunk + tl.program_id(0)).to(tl.int64)
    replicas_ptr += chunk * 5 * num_replicas
    pairs_before, replicas_before, shared_before = 0, 0, 0
    for first in range(0, key_tiles, TILES):
        tile_id = first + tl.arange(0, TILES)
        total = tl.load(total_ptr + table * key_tiles + tile_id, mask=tile_id < key_tiles, other=0)
        begin = pairs_before + tl.cumsum(total, 0) - total
        tl.store(begin_ptr + table * key_tiles + tile_id, begin, mask=tile_id < key_tiles)
        replicas = (total + capacity - 1) // capacity
        shared = tl.where(replicas > 1, replicas, 0)
        entry = replicas_ptr + replicas_before + tl.cumsum(replicas, 0) - replicas
        slot = shared_before + tl.cumsum(shared, 0) - shared
        for rank in range(tl.max(replicas, 0)):
            used = rank < replicas
            tl.store(entry + rank, tile_id, mask=used)
            tl.store(entry + rank + num_replicas, tl.minimum(total - rank * capacity, capacity), mask=used)
            tl.store(entry + rank + 2 * num_replicas, begin + rank * capacity, mask=used)
            tl.store(entry + rank + 3 * num_replicas, tl.where(replicas > 1, slot + rank, -1), mask=used)
            tl.store(entry + rank + 4 * num_replicas, tl.where(rank == 0, shared, 0), mask=used)
        pairs_before += tl.sum(total, 0)
        replicas_before += tl.sum(replicas, 0)
        shared_before += tl.sum(shared, 0)
    for first in range(replicas_before, num_replicas, TILES):
        unused = first + tl.arange(0, TILES)
        tl.store(replicas_ptr + num_replicas + unused, tl.zeros([TILES], tl.int32), mask=unused < num_replicas)
        tl.store(replicas_ptr + 4 * num_replicas + unused, tl.zeros([TILES], tl.int32), mask=unused < num_replicas)


@jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "key_tiles"])
def scatter(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, key_tiles,
    before_ptr, begin_ptr, order_ptr,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Store every pair in order: after earlier key tiles, earlier words of its tile, and earlier bits of its word."""
    query, slot, tile_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, HAS_POSITIONS,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    word = (table * words + query // 32) * key_tiles + tile_id
    earlier = tl.load(marks_ptr + word, mask=listed, other=0) & ((1 << (query % 32)) - 1)
    rank = tl.load(begin_ptr + table * key_tiles + tile_id, mask=listed, other=0)
    rank += tl.load(before_ptr + word, mask=listed, other=0) + _ones(earlier)
    first_query = tl.program_id(2).to(tl.int64) * num_queries + (first_chunk + tl.program_id(1)) * chunk
    tl.store(order_ptr + first_query * n + rank, query * n + slot, mask=listed)
