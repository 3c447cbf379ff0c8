"""Memory that :mod:`flexnsa.attention.flex` saves for backward, and that backward allocates, on CUDA."""

from __future__ import annotations

from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.config import num_blocks
from flexnsa.masks.intervals import DENSE_TILE


def _saved(tag: str, sizes: AttentionSizes) -> int:
    if tag == "cmp":
        return sizes.outputs + sizes.lse + _repeated_keys(sizes)
    if tag == "win":
        return sizes.outputs + sizes.lse + sizes.keys(sizes.seq_len)
    # Folded queries, outputs and log-sum-exp, gathered keys, and the unfolded output.
    counts = 4 * sizes.batch * sizes.num_kv_heads * sizes.seq_len
    rows = _folded(sizes.queries + sizes.outputs + sizes.lse, sizes)
    return sizes.outputs + rows + _gathered_keys(sizes) + sizes.indices + counts + _transposed_lists(sizes)


def _backward(tag: str, sizes: AttentionSizes) -> int:
    delta = 4 * sizes.batch * sizes.seq_len * sizes.num_heads
    if tag == "slc":  # the folded gradient of the output replaces the folded output
        return _folded(sizes.queries + delta, sizes) + _gathered_keys(sizes)
    return sizes.queries + delta + (_repeated_keys(sizes) if tag == "cmp" else sizes.keys(sizes.seq_len))


def _repeated_keys(sizes: AttentionSizes) -> int:
    """Return the bytes of compressed keys and values, in whole tiles, repeated for each query head."""
    return sizes.group * sizes.keys((sizes.length("cmp") // DENSE_TILE + 1) * DENSE_TILE)


def _folded(size: int, sizes: AttentionSizes) -> int:
    """Return a size with the heads of each group padded to a multiple of 16 rows."""
    return size * (-(-sizes.group // 16) * 16) // sizes.group


def _num_replicas(sizes: AttentionSizes) -> int:
    """Return the number of replicas of key tiles, see :mod:`flexnsa.masks.selected`."""
    block_size = sizes.config.select_block_size
    return -(-(num_blocks(sizes.seq_len, sizes.config) + sizes.seq_len // block_size) // 8) * 8


def _gathered_keys(sizes: AttentionSizes) -> int:
    """Return the bytes of gathered keys and values."""
    return sizes.keys(_num_replicas(sizes) * sizes.config.select_block_size)


def _transposed_lists(sizes: AttentionSizes) -> int:
    """Return the bytes of each replica's queries, their number, and its first token."""
    entries = sizes.config.select_block_size * sizes.config.num_selected_blocks + 2
    return 4 * sizes.batch * sizes.num_kv_heads * _num_replicas(sizes) * entries


FOOTPRINT = Footprint(_saved, _backward)
