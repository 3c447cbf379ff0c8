"""How a row is cut whose tokens several ranks share, as far as whole numbers say."""

from __future__ import annotations

from collections.abc import Sequence

from flexnsa.config import NSAConfig


def halos(config: NSAConfig) -> tuple[int, int]:
    """Count the tokens that a chunk needs of its neighbours: ``w - 1`` before it, ``l - d`` behind it."""
    return config.window_size - 1, config.compress_block_size - config.compress_stride


def check_chunks(name: str, tokens: int, count: int, config: NSAConfig, branches: Sequence[str]) -> None:
    """Demand tokens that ``count`` chunks can share: a halo comes from the next chunk alone, and blocks begin with it.

    Raises:
        ValueError: the tokens are too few, or no multiple; the message begins with ``name``.
    """
    before, behind = halos(config)
    least, stride = max(before if "win" in branches else 0, behind), config.compress_stride
    if tokens % (count * stride) or tokens // count < least:
        expected = f"{count} chunks of at least {least} tokens, in multiples of compress_stride={stride}"
        raise ValueError(f"{name}: expected {expected}, got {tokens} tokens")
