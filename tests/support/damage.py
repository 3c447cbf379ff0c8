"""Ways in which a file can be damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "cut in the middle": lambda data: data[: len(data) // 2],
    "cut in its first part": lambda data: data[:20],
    "empty": lambda _: b"",
    "twice": lambda data: data + data,
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


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
