"""Memory that :mod:`flexnsa.attention.triton` saves for backward, and that backward allocates."""

from __future__ import annotations

from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.attention.plan import gathers_keys
from flexnsa.attention.tiles.selected import max_replicas, max_shared, num_key_tiles
from flexnsa.attention.triton.selected import capacity_of, chunk_of, sizes_of_parts


def _saved(tag: str, sizes: AttentionSizes) -> int:
    lists = _lists(sizes) if tag == "slc" and not _gathers(sizes) else 0
    return sizes.inputs(tag) + sizes.outputs + sizes.lse + lists


def _backward(tag: str, sizes: AttentionSizes) -> int:
    gradients = sizes.queries + sizes.keys(sizes.length(tag))
    if tag == "cmp":  # at most so many sums of keys' gradients, fp32
        gradients += 4 * sizes.group * sizes.keys(sizes.length(tag)) // sizes.activation
    return gradients + (_workspace(sizes) if tag == "slc" else 2 * sizes.lse)


def _gathers(sizes: AttentionSizes) -> bool:
    """Return whether only backward has lists, and no gradient of a query is stored in parts."""
    return gathers_keys(sizes.config.num_selected_blocks)


def _lists(sizes: AttentionSizes) -> int:
    """Return the bytes of the pairs, as many as indices, and of five integers per replica."""
    chunk = _chunk(sizes)
    key_tiles = num_key_tiles(sizes.seq_len, sizes.config.select_block_size, has_positions=False)
    replicas = max_replicas(key_tiles, chunk * sizes.config.num_selected_blocks, _capacity(sizes))
    return sizes.indices + 4 * sizes.batch * sizes.num_kv_heads * -(-sizes.seq_len // chunk) * 5 * replicas


def _workspace(sizes: AttentionSizes) -> int:
    """Return the bytes of partial outputs of a chunk, fp32 gradients with shared replicas, and row statistics."""
    pairs = min(_chunk(sizes), sizes.seq_len) * sizes.config.num_selected_blocks
    keys = sizes.seq_len + max_shared(pairs, _capacity(sizes)) * sizes.config.select_block_size
    of_queries, lists = pairs * sizes.group * sizes.head_dim * sizes.activation, 0
    if _gathers(sizes):
        of_queries, lists = 0, _lists(sizes)
    of_head = of_queries + 4 * keys * (sizes.head_dim + sizes.v_head_dim)
    elements, heads = sizes_of_parts(sizes.batch, sizes.num_kv_heads, of_head)
    return elements * heads * of_head + 2 * sizes.lse + lists


def _chunk(sizes: AttentionSizes) -> int:
    widest = max(sizes.head_dim, sizes.v_head_dim)
    n = sizes.config.num_selected_blocks
    return chunk_of(0 if _gathers(sizes) else sizes.group * n * widest * sizes.activation)


def _capacity(sizes: AttentionSizes) -> int:
    return capacity_of(sizes.group, sizes.activation)


FOOTPRINT = Footprint(_saved, _backward)
