# pyright: standard, reportGeneralTypeIssues=false
"""For every key tile the list of queries that selected it: a stable counting sort, equal in every run.

Queries are split into *chunks*, each with its own lists. A *pair* is a query of a chunk and one of its ``n`` slots,
``query * n + slot``. A *key tile* is a run of keys that a program loads at once. A *replica* of it serves at most
``capacity`` of its queries, so that block 0, which every query selects, is not one long loop.

Without positions a key tile is a block. With them a block may start anywhere. If all keys of the block that its query
sees are in one aligned run of ``block_size`` keys, its key tile is that run. Otherwise it crosses from one run to the
next, as no other block does there, and has the key tile of that boundary. Two key tiles per run are enough, however
many documents there are (:mod:`flexnsa.masks.selected`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.tiles.selected import Part, is_whole, max_replicas, num_key_tiles
from flexnsa.attention.triton.arguments import position_arguments
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.selected_pairs import locate
from flexnsa.attention.triton.kernels.visible import load_positions

SCRATCH_BYTES = 64 * 2**20
"""Limit of the marks that exist at a time; one chunk of one head may take more."""
WORD = 32
"""Number of queries whose marks are the bits of one int."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected blocks and the position of each query.

    Args:
        block_indices: int32 ``(B, Hkv, T, n)``, contiguous.
        token: int32 ``(B or 1, T)``, increasing along ``T``, contiguous; None for one whole sequence from token 0.
        start: likewise, the first key of the query's document.
        block_size: keys per block.
        num_keys: number of keys.
    """

    block_indices: Tensor
    token: Tensor | None
    start: Tensor | None
    block_size: int
    num_keys: int

    @property
    def num_key_tiles(self) -> int:
        """Upper bound of the number of key tiles."""
        return num_key_tiles(self.num_keys, self.block_size, has_positions=self.token is not None)

    def positions(self) -> tuple[Tensor | int, ...]:
        """Return token and start as arguments of a kernel, with their batch stride."""
        return position_arguments(self.block_indices, self.token, self.start)

    def of_heads(self, part: Part) -> Selection:
        """Keep a part."""
        if is_whole(part, self.block_indices):
            return self
        token, start = (x if x is None or x.shape[0] == 1 else x[part[0]] for x in (self.token, self.start))
        return replace(self, block_indices=self.block_indices[part], token=token, start=start)


@dataclass(frozen=True, slots=True)
class Lists:
    """The pairs of every chunk by key tile, split into replicas.

    Args:
        order: int32 ``(B, Hkv, T * n)``: the pairs of one chunk after the other, by key tile, then by query.
        replicas: int32 ``(B, Hkv, chunks * 5, V)``, five rows a chunk. For each replica: its key tile; the number of
            its queries, 0 for unused replicas at the end; the start of its queries in the chunk's order; its index
            among the replicas of key tiles with several, or -1; and their number for the first replica of such a tile,
            else 0.
        chunk: queries per chunk.
        capacity: upper bound of the queries of a replica.
    """

    order: Tensor
    replicas: Tensor
    chunk: int
    capacity: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of chunks, and that of replicas in each."""
        return self.replicas.shape[2] // 5, self.replicas.shape[3]

    def of_heads(self, part: Part) -> Lists:
        """Keep a part."""
        if is_whole(part, self.order):
            return self
        return replace(self, order=self.order[part], replicas=self.replicas[part])


def empty_lists(block_indices: Tensor, key_tiles: int, chunk: int, capacity: int) -> Lists:
    """Allocate the lists; sizes may be symbolic."""
    batch, heads, num_queries, n = block_indices.shape
    num_chunks = (num_queries + chunk - 1) // chunk
    # Chunks are no dimension: PyTorch asks of each size whether it is 1, and a graph would serve one chunk alone.
    replicas = (batch, heads, num_chunks * 5, max_replicas(key_tiles, chunk * n, capacity))
    order = block_indices.new_empty(batch, heads, num_queries * n, dtype=torch.int32)
    return Lists(order, block_indices.new_empty(replicas, dtype=torch.int32), chunk, capacity)


def build_lists(selection: Selection, chunk: int, capacity: int) -> Lists:
    """Sort the pairs of every chunk stably by key tile, and split tiles into replicas, without synchronising."""
    batch, heads, num_queries, n = selection.block_indices.shape
    key_tiles = selection.num_key_tiles
    lists = empty_lists(selection.block_indices, key_tiles, chunk, capacity)
    num_chunks, num_replicas = lists.sizes
    words = -(-min(chunk, num_queries) // WORD)
    at_once = min(num_chunks, max(1, SCRATCH_BYTES // (8 * batch * heads * words * key_tiles)))
    before, total, begin = (lists.order.new_empty(batch * heads, at_once, n, key_tiles) for n in (words, 1, 1))

    tile = max(WORD, 1024 // padded(n, least=1))
    sizes: dict[str, object] = {"n": n, "NP": padded(n, least=1), "QUERIES": tile, "SIZE": selection.block_size}
    sizes |= {"HAS_POSITIONS": selection.token is not None}
    pairs = (selection.block_indices, *selection.positions(), heads, num_queries, selection.num_keys)
    for first in range(0, num_chunks, at_once):
        some = min(at_once, num_chunks - first)
        marks = lists.order.new_empty(batch * heads, some, words, key_tiles)
        tables = (some, batch * heads)
        chunks = (first, chunk, words, key_tiles)
        mark[(cdiv(words * WORD, tile), *tables)](*pairs, marks, *chunks, **sizes, TILES=128)
        count_queries[(cdiv(key_tiles, 16), *tables)](marks, before, total, words, key_tiles, WORDS=64, TILES=16)
        cut[tables](
            total, begin, lists.replicas, first, num_chunks, num_replicas, key_tiles, capacity, TILES=1024, num_warps=8
        )
        scatter[(cdiv(words * WORD, tile), *tables)](*pairs, marks, *chunks, before, begin, lists.order, **sizes)
    return lists


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
