"""What each phase of NSA has to do, in closed form: arithmetic, traffic with memory and exponentials.

Arithmetic is that of the definition: products of the pairs of query and key that a mask shows, 2 operations a multiply
and add; tiles that reach over a mask's edge and padded rows do more. Traffic at the least reads every input and
writes every output once. ``moved`` is the traffic of the kernels as they are built, where that is more by design.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexnsa.attention.footprint import AttentionSizes
from flexnsa.config import NSAConfig, num_compressed


@dataclass(frozen=True)
class Work:
    """One pass of a phase.

    Args:
        flops: of products.
        least: bytes that it cannot do without.
        extra: bytes that its kernels move in addition.
        exps: exponentials.
    """

    flops: int
    least: int
    extra: int = 0
    exps: int = 0

    @property
    def moved(self) -> int:
        """Bytes between chip and memory, all in all."""
        return self.least + self.extra


Passes = dict[str, Work]
"""By ``forward`` and ``backward``, if there is one."""


def work_of(sizes: AttentionSizes) -> dict[str, Passes]:
    """Return the work of every phase, by the names under which phases are measured."""
    return {
        "compress": _compress(sizes),
        "cmp branch": _attend("cmp", sizes),
        "score and select": _select(sizes),
        "lists": {"forward": Work(0, 2 * sizes.indices)},  # block numbers in, the same pairs out in another order
        "slc branch": _attend("slc", sizes),
        "win branch": _attend("win", sizes),
        "gate": _gate(sizes),
    }


def pairs(tag: str, seq_len: int, config: NSAConfig) -> int:
    """Count the keys that all queries of a sequence together see in one head of a branch."""
    return sum(keys_seen(tag, t, config) for t in range(seq_len))


def keys_seen(tag: str, t: int, config: NSAConfig) -> int:
    """Count the keys that the query at ``t`` sees; its own block is among those that it selects."""
    if tag == "cmp":
        return num_compressed(t + 1, config)
    if tag == "win":
        return min(t + 1, config.window_size)
    size = config.select_block_size
    unfinished = size - 1 - t % size
    return min(config.num_selected_blocks, t // size + 1) * size - unfinished


def _attend(tag: str, sizes: AttentionSizes) -> Passes:
    seen = _pairs_of_heads(tag, sizes)
    dk, dv = sizes.head_dim, sizes.v_head_dim
    keys, ends = sizes.keys(sizes.length(tag)), sizes.queries + sizes.outputs
    forward, backward = _partial_rows(sizes) if tag == "slc" else (0, 0)
    return {
        "forward": Work(2 * (dk + dv) * seen, ends + keys + sizes.lse, forward, seen),
        # Scores and dP again, then dv, dk and dq.
        "backward": Work(2 * (3 * dk + 2 * dv) * seen, 2 * (ends + keys) + sizes.lse, backward, seen),
    }


def _partial_rows(sizes: AttentionSizes) -> tuple[int, int]:
    """Bytes that key-major kernels add: rows are read for each of ``n`` blocks, and each leaves a row to be summed."""
    n = sizes.config.num_selected_blocks
    again = (n - 1) * (sizes.queries + sizes.lse)
    forward = again + 2 * n * (sizes.outputs + sizes.lse)
    backward = again + (n - 1) * (sizes.outputs + sizes.lse) + 2 * n * sizes.queries
    return forward, backward


def _select(sizes: AttentionSizes) -> Passes:
    seen, k_cmp = _pairs_of_heads("cmp", sizes), sizes.per_head(sizes.num_kv_heads, sizes.head_dim, sizes.length("cmp"))
    return {"forward": Work(2 * sizes.head_dim * seen, sizes.queries + k_cmp + sizes.lse + sizes.indices, exps=seen)}


def _compress(sizes: AttentionSizes) -> Passes:
    """Two MLPs with a hidden layer of 4 D, one for keys and one for values."""
    config, tokens = sizes.config, sizes.batch * sizes.num_kv_heads * sizes.length("cmp")
    block = config.compress_block_size
    weights = sum(4 * dim * dim * (block + 1) for dim in (sizes.head_dim, sizes.v_head_dim))
    in_and_out = sizes.keys(sizes.seq_len) + sizes.keys(sizes.length("cmp"))
    forward = Work(2 * tokens * weights, in_and_out + sizes.activation * weights)
    return {
        "forward": forward,
        "backward": Work(2 * forward.flops, in_and_out + sizes.keys(sizes.seq_len) + 2 * sizes.activation * weights),
    }


def _gate(sizes: AttentionSizes) -> Passes:
    gates, branches = sizes.per_head(sizes.num_heads, 3, sizes.seq_len), 3 * sizes.outputs
    flops = 2 * 3 * sizes.batch * sizes.num_heads * sizes.seq_len * sizes.v_head_dim
    return {
        "forward": Work(flops, branches + gates + sizes.outputs),
        "backward": Work(2 * flops, 2 * (branches + gates) + sizes.outputs),
    }


def _pairs_of_heads(tag: str, sizes: AttentionSizes) -> int:
    return sizes.batch * sizes.num_heads * pairs(tag, sizes.seq_len, sizes.config)
