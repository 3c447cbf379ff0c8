"""How a row is cut whose tokens several ranks share, as far as whole numbers say."""

from __future__ import annotations

from collections.abc import Sequence

from flexnsa.config import NSAConfig


def check_chunks(name: str, tokens: int, count: int, config: NSAConfig, branches: Sequence[str]) -> None:
    """Demand tokens that ``count`` chunks can share: a halo comes from the next chunk alone, and blocks begin with it.

    Raises:
        ValueError: the tokens are too few, or no multiple; the message begins with ``name``.
    """
    window = config.window_size - 1 if "win" in branches else 0
    least, stride = max(window, config.compress_block_size - config.compress_stride), config.compress_stride
    if tokens % (count * stride) or tokens // count < least:
        expected = f"{count} chunks of at least {least} tokens, in multiples of compress_stride={stride}"
        raise ValueError(f"{name}: expected {expected}, got {tokens} tokens")
