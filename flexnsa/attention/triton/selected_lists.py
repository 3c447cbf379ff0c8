"""For every key block the list of queries that selected it: a stable counting sort, the same at every run.

Queries come in *chunks*, each with lists of its own. A *pair* is a query of a chunk and one of its ``n`` slots,
``query * n + slot``; a *bin* is one run of keys that a program can load at once; a *copy* is a bin with at most
``capacity`` of the queries that want it, so that block 0, which all want, is not one long loop.

Without positions a bin is a block. With them a block begins anywhere: if all that its query sees of it lies in one
aligned run of ``block_size`` keys, its bin is that run; else the bin is the boundary that it crosses, which no other
block does. Two bins a run are enough, however many documents there are (:mod:`flexnsa.masks.selected`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels.selected_lists import count_queries, cut, mark, scatter
from flexnsa.attention.triton.operators import position_arguments
from flexnsa.attention.triton.selected_sizes import max_copies, num_bins

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
        return num_bins(self.num_keys, self.block_size, has_positions=self.token is not None)

    def positions(self) -> tuple[Tensor, Tensor, int]:
        """Token and start as a kernel takes them, with their stride of the batch."""
        return position_arguments(self.token, self.start, self.block_indices)

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
            end), where in the chunk's order they begin, its index among the copies of bins that have several (-1 if
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
    before = lists.order.new_empty(batch * heads, at_once, words, bins)
    total, begin = lists.order.new_empty(2, batch * heads, at_once, bins)

    tile = max(WORD, 1024 // padded(n, least=1))
    sizes: dict[str, object] = {"n": n, "NP": padded(n, least=1), "QUERIES": tile, "SIZE": selection.block_size}
    sizes |= {"HAS_POSITIONS": selection.token is not None}
    pairs = (selection.block_indices, *selection.positions(), heads, num_queries, selection.num_keys)
    for first in range(0, num_chunks, at_once):
        some = min(at_once, num_chunks - first)
        marks = lists.order.new_zeros(batch * heads, some, words, bins)
        tables = (some, batch * heads)
        chunks = (first, chunk, words, bins)
        mark[(cdiv(words * WORD, tile), *tables)](*pairs, marks, *chunks, **sizes)
        count_queries[(cdiv(bins, 16), *tables)](marks, before, total, words, bins, WORDS=64, BINS=16)
        cut[tables](total, begin, lists.copies, first, num_chunks, num_copies, bins, capacity, BINS=1024, num_warps=8)
        scatter[(cdiv(words * WORD, tile), *tables)](*pairs, marks, *chunks, before, begin, lists.order, **sizes)
    return lists
