# pyright: standard, reportGeneralTypeIssues=false
"""A counting sort of pairs by bin; :mod:`flexnsa.attention.triton.selected_lists` says what these are."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.selected_pairs import load_positions, locate
from flexnsa.attention.triton.typed import jit


@jit
def _tile_of_pairs(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Queries of the chunk, slots, bins and whether they are to be listed, of a tile of pairs."""
    bh = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = (first_chunk + tl.program_id(1)) * chunk + query
    slot = tl.arange(0, NP)[None, :]
    inside = ((query < chunk) & (t < num_queries))[:, None] & (slot < n)
    block = tl.load(idx_ptr + (bh * num_queries + t)[:, None] * n + slot, mask=inside, other=-1)
    at = (bh // heads) * p_sb
    token, start = load_positions(token_ptr + at, start_ptr + at, t, num_queries, HAS_POSITIONS)
    _, bin_id, seen = locate(block, token[:, None], start[:, None], num_keys, SIZE, HAS_POSITIONS)
    return query[:, None], slot, bin_id, inside & seen


@jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "bins"])
def mark(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, bins,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Set the bit of every query in the words of its bins: whatever comes first, the result is the same."""
    query, _, bin_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, HAS_POSITIONS,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    bit = tl.broadcast_to(1 << (query % 32), [QUERIES, NP])
    tl.atomic_or(marks_ptr + (table * words + query // 32) * bins + bin_id, bit, mask=listed, sem="relaxed")


@jit
def _ones(x):
    """How many bits of each int are set."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@jit(do_not_specialize=["words", "bins"])
def count_queries(marks_ptr, before_ptr, total_ptr, words, bins, WORDS: tl.constexpr, BINS: tl.constexpr):
    """Count the queries of each bin, and for each word those in the words before it."""
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    bin_id = tl.program_id(0) * BINS + tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        at = (table * words + word)[:, None] * bins + bin_id[None, :]
        inside = (word < words)[:, None] & (bin_id < bins)[None, :]
        count = _ones(tl.load(marks_ptr + at, mask=inside, other=0))
        tl.store(before_ptr + at, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(total_ptr + table * bins + bin_id, total, mask=bin_id < bins)


@jit(do_not_specialize=["first_chunk", "num_chunks", "num_copies", "bins", "capacity"])
def cut(
    total_ptr, begin_ptr, copies_ptr, first_chunk, num_chunks, num_copies, bins, capacity, BINS: tl.constexpr
):  # fmt: skip
    """Say where each bin begins in the order, and cut it into copies."""
    table = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    chunk = (tl.program_id(1) * num_chunks + first_chunk + tl.program_id(0)).to(tl.int64)
    copies_ptr += chunk * 5 * num_copies
    pairs_before, copies_before, shared_before = 0, 0, 0
    for first in range(0, bins, BINS):
        bin_id = first + tl.arange(0, BINS)
        total = tl.load(total_ptr + table * bins + bin_id, mask=bin_id < bins, other=0)
        begin = pairs_before + tl.cumsum(total, 0) - total
        tl.store(begin_ptr + table * bins + bin_id, begin, mask=bin_id < bins)
        copies = (total + capacity - 1) // capacity
        shared = tl.where(copies > 1, copies, 0)
        entry = copies_ptr + copies_before + tl.cumsum(copies, 0) - copies
        slot = shared_before + tl.cumsum(shared, 0) - shared
        for rank in range(tl.max(copies, 0)):
            used = rank < copies
            tl.store(entry + rank, bin_id, mask=used)
            tl.store(entry + rank + num_copies, tl.minimum(total - rank * capacity, capacity), mask=used)
            tl.store(entry + rank + 2 * num_copies, begin + rank * capacity, mask=used)
            tl.store(entry + rank + 3 * num_copies, tl.where(copies > 1, slot + rank, -1), mask=used)
            tl.store(entry + rank + 4 * num_copies, tl.where(rank == 0, shared, 0), mask=used)
        pairs_before += tl.sum(total, 0)
        copies_before += tl.sum(copies, 0)
        shared_before += tl.sum(shared, 0)
    for first in range(copies_before, num_copies, BINS):
        unused = first + tl.arange(0, BINS)
        tl.store(copies_ptr + num_copies + unused, tl.zeros([BINS], tl.int32), mask=unused < num_copies)
        tl.store(copies_ptr + 4 * num_copies + unused, tl.zeros([BINS], tl.int32), mask=unused < num_copies)


@jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "bins"])
def scatter(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, bins,
    before_ptr, begin_ptr, order_ptr,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Put every pair in order: behind the bins, the words and the bits of its word that are before it."""
    query, slot, bin_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, HAS_POSITIONS,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    word = (table * words + query // 32) * bins + bin_id
    earlier = tl.load(marks_ptr + word, mask=listed, other=0) & ((1 << (query % 32)) - 1)
    rank = tl.load(begin_ptr + table * bins + bin_id, mask=listed, other=0)
    rank += tl.load(before_ptr + word, mask=listed, other=0) + _ones(earlier)
    first_query = tl.program_id(2).to(tl.int64) * num_queries + (first_chunk + tl.program_id(1)) * chunk
    tl.store(order_ptr + first_query * n + rank, query * n + slot, mask=listed)
