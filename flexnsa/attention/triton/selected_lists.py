# pyright: reportGeneralTypeIssues=false
"""For every key block the list of queries that selected it: a stable counting sort, the same at every run.

Queries come in *chunks*, each with lists of its own. A *pair* is a query of a chunk and one of its ``n`` slots,
``query * n + slot``; a *bin* is one run of keys that a program can load at once; a *copy* is a bin with at most
``capacity`` of the queries that want it, so that block 0, which all want, is not one long loop.

Without positions a bin_id is a block. With them a block begins anywhere: if all that its query sees of it lies in one
aligned run of ``block_size`` keys, its bin is that run; else the bin is the boundary that it crosses, which no other
block does. Two bins a run are enough, however many documents there are (:mod:`flexnsa.masks.selected`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexnsa.attention.triton.selected_pairs import locate, place
from flexnsa.attention.triton.tiles import launch

SCRATCH_BYTES = 64 * 2**20
"""Of the marks that are counted at a time; one chunk of one head may take more."""
WORD = 32
"""Queries whose marks are the bits of one int."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What each query selected, and where it stands.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, contiguous.
        token: int32 ``(B or 1, T)``, increasing along ``T``, contiguous; None for one whole sequence from token 0.
        start: likewise, the first key of the query's document.
        block_size: keys a block.
        num_keys: keys there are.
    """

    block_indices: Tensor
    token: Tensor | None
    start: Tensor | None
    block_size: int
    num_keys: int

    @property
    def num_bins(self) -> int:
        """Bins that there may be."""
        return num_bins(self.num_keys, self.block_size, placed=self.token is not None)

    def places(self) -> tuple[Tensor, Tensor, int]:
        """Token and start as a kernel takes them, with their stride of the batch."""
        if self.token is None or self.start is None:
            return self.block_indices, self.block_indices, 0
        return self.token, self.start, self.token.stride(0) if self.token.shape[0] > 1 else 0

    def of_heads(self, batch: slice, heads: slice) -> Selection:
        """Keep some rows of the batch, or some heads of one."""
        token, start = (x if x is None or x.shape[0] == 1 else x[batch] for x in (self.token, self.start))
        return replace(self, block_indices=self.block_indices[batch, heads], token=token, start=start)


@dataclass(frozen=True, slots=True)
class Lists:
    """The pairs of every chunk by bin, cut into copies.

    Args:
        order: int32 ``(B, Hkv, T * n)``: the pairs of one chunk after the other; by bin, then by query.
        copies: int32 ``(B, Hkv, chunks, 5, V)``: of each copy its bin, its queries (0 for the unused copies at the
            end), where in the chunk's order they begin, its place among the copies of bins that have several (-1 if
            it is its bin's only one), and the number of such copies if it is the first of them, else 0.
        chunk: queries a chunk.
        capacity: queries of a copy, at most.
    """

    order: Tensor
    copies: Tensor
    chunk: int
    capacity: int

    def of_heads(self, batch: slice, heads: slice) -> Lists:
        """Keep some rows of the batch, or some heads of one."""
        return replace(self, order=self.order[batch, heads], copies=self.copies[batch, heads])


def num_bins(num_keys: int, block_size: int, *, placed: bool) -> int:
    """Count the bins that ``num_keys`` keys may need; ``placed`` queries may begin before the first key."""
    runs = (num_keys + block_size - 1) // block_size
    return 2 * (runs + 1) if placed else runs


def max_copies(bins: int, num_pairs: int, capacity: int) -> int:
    """Bound the copies of a chunk: at most one short one a bin, and as many full ones as the pairs fill."""
    return bins + num_pairs // capacity


def max_shared(num_pairs: int, capacity: int) -> int:
    """Bound the copies of bins that have several: each such bin fills all but one, at least half of them."""
    return max(1, 2 * (num_pairs // capacity))


def empty_lists(block_indices: Tensor, bins: int, chunk: int, capacity: int) -> Lists:
    """Make room for the lists; sizes may be symbols."""
    batch, heads, num_queries, n = block_indices.shape
    num_chunks = (num_queries + chunk - 1) // chunk
    copies = (batch, heads, num_chunks, 5, max_copies(bins, chunk * n, capacity))
    order = block_indices.new_empty(batch, heads, num_queries * n, dtype=torch.int32)
    return Lists(order, block_indices.new_empty(copies, dtype=torch.int32), chunk, capacity)


def build_lists(selection: Selection, chunk: int, capacity: int) -> Lists:
    """Sort the pairs of every chunk by bin, stably, and cut the bins into copies; nothing waits for the device."""
    batch, heads, num_queries, n = selection.block_indices.shape
    bins = selection.num_bins
    lists = empty_lists(selection.block_indices, bins, chunk, capacity)
    num_chunks, num_copies = lists.copies.shape[2], lists.copies.shape[4]
    words = -(-min(chunk, num_queries) // WORD)
    at_once = min(num_chunks, max(1, SCRATCH_BYTES // (8 * batch * heads * words * bins)))
    new = {"dtype": torch.int32, "device": lists.order.device}
    before = torch.empty(batch * heads, at_once, words, bins, **new)
    total, begin = torch.empty(2, batch * heads, at_once, bins, **new)

    tile = max(WORD, 1024 // triton.next_power_of_2(n))
    sizes: dict[str, object] = {"n": n, "NP": triton.next_power_of_2(n), "QUERIES": tile, "SIZE": selection.block_size}
    sizes |= {"PLACED": selection.token is not None}
    pairs = (selection.block_indices, *selection.places(), heads, num_queries, selection.num_keys)
    for first in range(0, num_chunks, at_once):
        some = min(at_once, num_chunks - first)
        marks = torch.zeros(batch * heads, some, words, bins, **new)
        tables = (some, batch * heads)
        chunks = (first, chunk, words, bins)
        launch(_mark, (triton.cdiv(words * WORD, tile), *tables))(*pairs, marks, *chunks, **sizes)
        launch(_count, (triton.cdiv(bins, 16), *tables))(marks, before, total, words, bins, WORDS=64, BINS=16)
        launch(_cut, tables)(
            total, begin, lists.copies, first, num_chunks, num_copies, bins, capacity, BINS=1024, num_warps=8
        )
        launch(_scatter, (triton.cdiv(words * WORD, tile), *tables))(
            *pairs, marks, *chunks, before, begin, lists.order, **sizes
        )
    return lists


@triton.jit
def _tile_of_pairs(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Queries of the chunk, slots, bins and whether they are to be listed, of a tile of pairs."""
    bh = tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = (first_chunk + tl.program_id(1)) * chunk + query
    slot = tl.arange(0, NP)[None, :]
    inside = ((query < chunk) & (t < num_queries))[:, None] & (slot < n)
    block = tl.load(idx_ptr + (bh * num_queries + t)[:, None] * n + slot, mask=inside, other=-1)
    at = (bh // heads) * p_sb
    token, start = place(token_ptr + at, start_ptr + at, t, num_queries, PLACED)
    _, bin_id, seen = locate(block, token[:, None], start[:, None], num_keys, SIZE, PLACED)
    return query[:, None], slot, bin_id, inside & seen


@triton.jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "bins"])
def _mark(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, bins,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Set the bit of every query in the words of its bins: whatever comes first, the result is the same."""
    query, _, bin_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, PLACED,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    bit = tl.broadcast_to(1 << (query % 32), [QUERIES, NP])
    tl.atomic_or(marks_ptr + (table * words + query // 32) * bins + bin_id, bit, mask=listed, sem="relaxed")


@triton.jit
def _ones(x):
    """How many bits of each int are set."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit(do_not_specialize=["words", "bins"])
def _count(marks_ptr, before_ptr, total_ptr, words, bins, WORDS: tl.constexpr, BINS: tl.constexpr):
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


@triton.jit(do_not_specialize=["first_chunk", "num_chunks", "num_copies", "bins", "capacity"])
def _cut(
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


@triton.jit(do_not_specialize=["p_sb", "heads", "num_queries", "num_keys", "first_chunk", "chunk", "words", "bins"])
def _scatter(
    idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, marks_ptr, first_chunk, chunk, words, bins,
    before_ptr, begin_ptr, order_ptr,
    n: tl.constexpr, NP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Put every pair in its place: behind the bins, the words and the bits of its word that are before it."""
    query, slot, bin_id, listed = _tile_of_pairs(
        idx_ptr, token_ptr, start_ptr, p_sb, heads, num_queries, num_keys, first_chunk, chunk,
        n, NP, QUERIES, SIZE, PLACED,
    )  # fmt: skip
    table = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    word = (table * words + query // 32) * bins + bin_id
    earlier = tl.load(marks_ptr + word, mask=listed, other=0) & ((1 << (query % 32)) - 1)
    place = tl.load(begin_ptr + table * bins + bin_id, mask=listed, other=0)
    place += tl.load(before_ptr + word, mask=listed, other=0) + _ones(earlier)
    first_query = tl.program_id(2).to(tl.int64) * num_queries + (first_chunk + tl.program_id(1)) * chunk
    tl.store(order_ptr + first_query * n + place, query * n + slot, mask=listed)
