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
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels.selected_lists import count_queries, cut, mark, scatter
from flexnsa.attention.triton.operators import position_arguments
from flexnsa.attention.triton.selected_sizes import Part, is_whole, max_replicas, num_key_tiles

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
        replicas: int32 ``(B, Hkv, chunks, 5, V)``. For each replica: its key tile; the number of its queries, 0 for
            unused replicas at the end; the start of its queries in the chunk's order; its index among the replicas of
            key tiles with several, or -1; and their number for the first replica of such a tile, else 0.
        chunk: queries per chunk.
        capacity: upper bound of the queries of a replica.
    """

    order: Tensor
    replicas: Tensor
    chunk: int
    capacity: int

    def of_heads(self, part: Part) -> Lists:
        """Keep a part."""
        if is_whole(part, self.order):
            return self
        return replace(self, order=self.order[part], replicas=self.replicas[part])


def empty_lists(block_indices: Tensor, key_tiles: int, chunk: int, capacity: int) -> Lists:
    """Allocate the lists; sizes may be symbolic."""
    batch, heads, num_queries, n = block_indices.shape
    num_chunks = (num_queries + chunk - 1) // chunk
    replicas = (batch, heads, num_chunks, 5, max_replicas(key_tiles, chunk * n, capacity))
    order = block_indices.new_empty(batch, heads, num_queries * n, dtype=torch.int32)
    return Lists(order, block_indices.new_empty(replicas, dtype=torch.int32), chunk, capacity)


def build_lists(selection: Selection, chunk: int, capacity: int) -> Lists:
    """Sort the pairs of every chunk stably by key tile, and split tiles into replicas, without synchronising."""
    batch, heads, num_queries, n = selection.block_indices.shape
    key_tiles = selection.num_key_tiles
    lists = empty_lists(selection.block_indices, key_tiles, chunk, capacity)
    num_chunks, num_replicas = lists.replicas.shape[2], lists.replicas.shape[4]
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
