"""Ways in which a file can be damaged."""

from __future__ import annotations

import random
from pathlib import Path


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip one bit of a byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def places(path: Path, count: int) -> list[int]:
    """Draw bytes of a file: some of its first part, some anywhere, and its last."""
    size, draws = path.stat().st_size, random.Random(path.name)
    first = min(size, 2000)
    return [*(draws.randrange(first) for _ in range(count)), *(draws.randrange(size) for _ in range(count)), size - 1]
