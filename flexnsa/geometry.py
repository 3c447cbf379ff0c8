"""Sizes and block grids as plain integers; everything here can be checked with pencil and paper."""

from __future__ import annotations

from flexnsa.config import NSAConfig

BRANCHES: tuple[str, ...] = ("cmp", "slc", "win")
"""Branch tags in the order of the gates: compressed, selected, sliding window."""


def num_compressed(seq_len: int, config: NSAConfig) -> int:
    """Count the compressed tokens ``N`` of a sequence: one per full block of ``l`` tokens every ``d``.

    This is also the number that the query at position ``seq_len - 1`` sees.
    """
    return max(0, (seq_len - config.compress_block_size) // config.compress_stride + 1)


def num_blocks(seq_len: int, config: NSAConfig) -> int:
    """Count the selection blocks ``M`` of a sequence, the last one possibly unfinished."""
    return -(-seq_len // config.select_block_size)


def blocks_within(num_keys: int, config: NSAConfig) -> int:
    """Bound the blocks of any sequence that has ``num_keys`` compressed tokens; at most one more than it has."""
    return max(1, num_blocks(num_keys * config.compress_stride + config.compress_block_size - 1, config))


def overlap_band(config: NSAConfig) -> tuple[int, tuple[int, ...]]:
    """Give the weights of the compressed tokens that overlap selection block 0 (NSA paper, Eq. 9).

    Returns ``(first, weights)``: compressed token ``j * l'/d + first + o`` shares ``weights[o] * d`` tokens with
    block ``j``, for every ``j``. For ``l, d, l'`` of 32, 16, 64 that is ``(-1, (1, 2, 2, 2, 1))``.
    """
    length = config.compress_block_size // config.compress_stride
    block = config.select_block_size // config.compress_stride
    offsets = range(1 - length, block)
    return offsets[0], tuple(min(o + length, block) - max(o, 0) for o in offsets)
