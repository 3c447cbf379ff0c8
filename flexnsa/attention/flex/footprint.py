"""What :mod:`flexnsa.attention.flex` saves for backward, and what backward allocates, on CUDA."""

from __future__ import annotations

from flexnsa.attention.footprint import AttentionSizes, Footprint
from flexnsa.geometry import num_blocks
from flexnsa.masks.intervals import DENSE_TILE


def _saved(tag: str, sizes: AttentionSizes) -> int:
    if tag == "cmp":
        return sizes.outputs + sizes.lse + _repeated_keys(sizes)
    if tag == "win":
        return sizes.outputs + sizes.lse + sizes.keys(sizes.seq_len)
    # Queries, outputs and log-sum-exp with the heads folded into rows, keys as gathered, and the output unfolded.
    counts = 4 * sizes.batch * sizes.num_kv_heads * sizes.seq_len
    rows = _folded(sizes.queries + sizes.outputs + sizes.lse, sizes)
    return sizes.outputs + rows + _copied_keys(sizes) + sizes.indices + counts + _transposed_lists(sizes)


def _backward(tag: str, sizes: AttentionSizes) -> int:
    delta = 4 * sizes.batch * sizes.seq_len * sizes.num_heads
    if tag == "slc":  # the output's folded gradient takes the place of the folded output
        return _folded(sizes.queries + delta, sizes) + _copied_keys(sizes)
    return sizes.queries + delta + (_repeated_keys(sizes) if tag == "cmp" else sizes.keys(sizes.seq_len))


def _repeated_keys(sizes: AttentionSizes) -> int:
    """Compressed keys and values, once for each query head, whole tiles."""
    return sizes.group * sizes.keys((sizes.length("cmp") // DENSE_TILE + 1) * DENSE_TILE)


def _folded(size: int, sizes: AttentionSizes) -> int:
    """The same with 16 rows for every 16 or fewer heads of a group."""
    return size * (-(-sizes.group // 16) * 16) // sizes.group


def _copies(sizes: AttentionSizes) -> int:
    """Copies of key blocks that balance backward, see :mod:`flexnsa.masks.selected`."""
    block_size = sizes.config.select_block_size
    return -(-(num_blocks(sizes.seq_len, sizes.config) + sizes.seq_len // block_size) // 8) * 8


def _copied_keys(sizes: AttentionSizes) -> int:
    """Keys and values as they are gathered."""
    return sizes.keys(_copies(sizes) * sizes.config.select_block_size)


def _transposed_lists(sizes: AttentionSizes) -> int:
    """Of every copy: its queries, how many they are, and its first token."""
    numbers = sizes.config.select_block_size * sizes.config.num_selected_blocks + 2
    return 4 * sizes.batch * sizes.num_kv_heads * _copies(sizes) * numbers


FOOTPRINT = Footprint(_saved, _backward)
