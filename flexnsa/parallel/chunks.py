"""Sizes of the chunks in which ranks share a sequence, in plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from flexnsa.config import NSAConfig


def window_halo(config: NSAConfig) -> int:
    """Return how many tokens before it a chunk needs for its window, ``w - 1``."""
    return config.window_size - 1


def block_halo(config: NSAConfig) -> int:
    """Return how many tokens after it a chunk needs for its blocks, ``l - d``; of index keys, given their sizes."""
    return config.compress_block_size - config.compress_stride


def check_chunks(name: str, tokens: int, count: int, config: NSAConfig, branches: Sequence[str]) -> None:
    """Check that ``count`` equal chunks of the tokens start on the strides and are at least as long as their halos.

    Raises:
        ValueError: the tokens are too few or not a multiple; the message starts with ``name``.
    """
    kinds = config.compressed.values()
    strides = dict(zip(("compress_stride", "index_stride"), (kind.compress_stride for kind in kinds), strict=False))
    least = max(window_halo(config) if "win" in branches else 0, *map(block_halo, kinds))
    if tokens % (count * lcm(*strides.values())) or tokens // count < least:
        first_of = {stride: what for what, stride in reversed(strides.items())}
        multiples = " and ".join(f"{what}={stride}" for stride, what in reversed(first_of.items()))
        expected = f"{count} chunks of at least {least} tokens, in multiples of {multiples}"
        raise ValueError(f"{name}: expected {expected}, got {tokens} tokens")
