"""Sizes of the chunks in which ranks share a sequence, in plain integers."""

from __future__ import annotations

from collections.abc import Sequence

from flexnsa.config import NSAConfig


def halos(config: NSAConfig) -> tuple[int, int]:
    """Return how many tokens a chunk needs of its neighbours: ``w - 1`` before it, ``l - d`` after it."""
    return config.window_size - 1, config.compress_block_size - config.compress_stride


def check_chunks(name: str, tokens: int, count: int, config: NSAConfig, branches: Sequence[str]) -> None:
    """Check that ``count`` equal chunks of the tokens start on the stride and are at least as long as their halos.

    Raises:
        ValueError: the tokens are too few or not a multiple; the message starts with ``name``.
    """
    before, after = halos(config)
    least, stride = max(before if "win" in branches else 0, after), config.compress_stride
    if tokens % (count * stride) or tokens // count < least:
        expected = f"{count} chunks of at least {least} tokens, in multiples of compress_stride={stride}"
        raise ValueError(f"{name}: expected {expected}, got {tokens} tokens")
