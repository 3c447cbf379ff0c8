"""Sizes and block grids, in plain integers."""

from __future__ import annotations

from collections.abc import Sequence

from flexnsa.config import NSAConfig

BRANCHES: tuple[str, ...] = ("cmp", "slc", "win")
"""Branch tags in the order of the gates: compressed, selected, sliding window."""
GATES = ("sigmoid", "softmax", "residual")
"""Kinds of gates, see :class:`flexnsa.layers.config.LayerConfig`."""


def gated_branches(gate: str, branches: Sequence[str]) -> tuple[str, ...]:
    """Return the branches that a kind of gate weights; the others have weight 1."""
    return tuple(tag for tag in branches if gate != "residual" or tag != "slc")


def num_compressed(seq_len: int, config: NSAConfig) -> int:
    """Return ``N``, the number of compressed tokens: one block of ``l`` tokens starts every ``d``, if it is complete.

    The query at position ``seq_len - 1`` sees all of them.
    """
    count = (seq_len - config.compress_block_size) // config.compress_stride + 1
    return count if count > 0 else 0  # exporters put their own max in place of Python's, and know less of what it gives


def num_blocks(seq_len: int, config: NSAConfig) -> int:
    """Return ``M``, the number of selection blocks of a sequence; the last one may be incomplete."""
    return -(-seq_len // config.select_block_size)


def blocks_within(num_keys: int, config: NSAConfig) -> int:
    """Return an upper bound of ``M`` for sequences with ``num_keys`` compressed tokens; at most one too many."""
    return max(1, num_blocks(num_keys * config.compress_stride + config.compress_block_size - 1, config))


def overlap_band(config: NSAConfig) -> tuple[int, tuple[int, ...]]:
    """Return the weights with which compressed tokens count for a selection block (NSA paper, Eq. 9).

    Returns ``(first, weights)``: compressed token ``j * l'/d + first + o`` shares ``weights[o] * d`` tokens with
    block ``j``, for every ``j``. For ``l, d, l'`` of 32, 16, 64 that is ``(-1, (1, 2, 2, 2, 1))``.
    """
    length = config.compress_block_size // config.compress_stride
    block = config.select_block_size // config.compress_stride
    offsets = range(1 - length, block)
    return offsets[0], tuple(min(o + length, block) - max(o, 0) for o in offsets)
