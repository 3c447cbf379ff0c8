"""The number of queries by which branches choose their kernels: every threshold, and the one decision made from them.

Few queries leave a GPU idle unless programs divide their keys; many have keys in common, which is worth a list for each
block of keys. Thresholds that count different things stay apart, whatever their values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexnsa.attention.interface import Call
from flexnsa.masks.intervals import DENSE_TILE

STEP_TOKENS = 8
"""Most new tokens of a sequence in one decoding step. Counts ``T``.

Up to here one operator can take the whole step, in 11 kernels instead of 45, whose launches took longer than reading
the cache (H200, ``benchmarks/results/decode_h200.json``). Programs that score blocks have one query and all heads of
its group: a tile of many queries would do 16 times as many products.
"""
DIVIDED_ROWS = 127
"""Most rows of queries that FlexAttention's decoding kernel takes. Counts ``T`` times the padded group.

A limit of PyTorch, not a measurement: 7 tokens of up to 16 heads. A step of ``STEP_TOKENS`` that goes branch by branch,
as with mods, is therefore one too long for it.
"""
TILE_ROWS = DENSE_TILE
"""Rows of a tile of FlexAttention's kernel for long queries, which the heads of a group can share. Counts ``T * G``."""
GATHERED_QUERIES = 16
"""Most queries for which ``sdpa`` gathers the keys of each one, or reads the cache as one slice. Counts ``T``.

It copies ``n * l'`` keys for each query, where a loop over blocks has a price for any number of queries. On one CPU
thread at 8k tokens (4 heads a group, 2 groups), gathering took 1 ms and the loop 14 for one query, 12 and 24 for 16, 27
and 35 for 32, and 76 and 37 for 64.
"""
OWN_KEYS_QUERIES = 64
"""Limit of the queries on a cache that each load their own keys on CUDA. Counts ``T``.

More of them have keys in common, which the Triton kernels for whole sequences load once. Set on an H200.
"""
THREADED_QUERIES = 4096
"""Fewest queries for which heads run on threads of their own on a CPU. Counts ``T``.

Time of operations on all heads, over that of a thread for each head (2 threads, 12 query and 2 key heads of 64): 0.4
to 0.9 at 512 to 2k queries, 1.0 or 1.2 by process at 4k, 1.1 at 8k, 1.2 at 16k.
"""


def padded_group(group: int) -> int:
    """Return the rows of a query's tile in the decoding kernel: a power of two that tensor cores take."""
    return max(16, 1 << (group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of a call and the kernels that suit their number; each property is read by the branches it names.

    Args:
        count: ``T``.
        heads: ``Hq``.
        kv_heads: ``Hkv``.
        is_cuda: whether they are on a GPU.
        has_mod: whether a score_mod tells heads and positions apart.
    """

    count: int
    heads: int
    kv_heads: int
    is_cuda: bool
    has_mod: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, call: Call) -> Queries:
        """Describe the queries ``q (B, Hq, T, Dk)`` of keys ``k (B, Hkv, S, Dk)``."""
        return cls(q.shape[2], q.shape[1], k.shape[1], q.is_cuda, call.score_mod is not None)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def divide_keys(self) -> bool:
        """``flex`` on a cache: FlexAttention's decoding kernel divides the keys of a query among programs."""
        return self.is_cuda and self.count * padded_group(self.group) <= DIVIDED_ROWS

    @property
    def fit_tile(self) -> bool:
        """``flex`` on a cache: the heads of a group are rows of one tile. To a mod such rows would be one head."""
        return not self.has_mod and (self.group == 1 or self.count * self.group <= TILE_ROWS)

    @property
    def share_keys(self) -> bool:
        """``triton`` on a cache: the kernels for whole sequences, which take no mods."""
        return self.is_cuda and not self.has_mod and self.count > OWN_KEYS_QUERIES

    @property
    def are_gathered(self) -> bool:
        """``sdpa``: the keys of each query are gathered, or the cache is read as one slice; mods need other code."""
        return not self.has_mod and self.count <= GATHERED_QUERIES
