"""Text to learn from: the Python sources of this machine, some packages of which are kept back whole.

A package is what a distribution installs, under whatever names; the standard library is one as well. Files follow each
other as they lie in their folders, so that a row holds, before a token, more of its file or of its neighbours. A file
that is there twice counts once, and what packages carry of others (``_vendor``) is left out: it would be met again. So
is a file kept back of which much stands, line by line, in the text to learn from.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexnsa.lm import Corpus

LONGEST_FILE = 2**18
"""Bytes; longer ones are tables."""
HELD_OUT = 0.05
"""Share of all bytes that is kept back, at least."""
LARGEST_HELD_OUT = 0.01
"""Share of all bytes that one package may have which is kept back: so they are several."""
KNOWN_LINES = 0.3
"""Share of the lines of 24 characters or more of a file kept back that may stand in the text to learn from."""
_SKIPPED = {"site-packages", "dist-packages", "__pycache__"}
_COPIED = {"_vendor", "_vendored", "vendor", "vendored", "extern"}


@dataclass
class Package:
    """A name and its files' bytes, a zero byte behind each."""

    name: str
    files: list[bytes] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Count the bytes."""
        return sum(map(len, self.files))


def standard_roots() -> list[Path]:
    """Return the folders of the running Python: its library, and the packages installed with it."""
    paths = sysconfig.get_paths()
    return [Path(root) for root in dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib"))]


def read_packages(roots: Sequence[Path]) -> list[Package]:
    """Read the packages below folders, each file once, packages and files in the order of their names."""
    library, paths = sysconfig.get_path("stdlib"), list[tuple[str, Path]]()
    owners = {name: min(distributions) for name, distributions in packages_distributions().items()}
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if _SKIPPED.isdisjoint(parts) and _COPIED.isdisjoint(parts[:-1]):
                name = parts[0].removesuffix(".py")
                paths.append(("Python" if str(root) == library else owners.get(name, name), file))
    with ThreadPoolExecutor(16) as pool:  # what takes long is to wait for a disk
        texts = list(pool.map(_read, (file for _, file in paths)))
    packages, seen = dict[str, Package](), set[bytes]()
    for (name, _), text in zip(paths, texts, strict=True):
        digest = hashlib.sha256(text).digest()
        if not text or digest in seen:
            continue
        seen.add(digest)
        packages.setdefault(name, Package(name)).files.append(text + b"\0")
    return sorted(packages.values(), key=lambda package: package.name)


def split_packages(packages: Iterable[Package]) -> tuple[list[Package], list[Package]]:
    """Keep back packages that are not large, by the hash of their names, until they are :data:`HELD_OUT` of all bytes.

    Returns:
        Those to train on, and those kept back.

    Raises:
        ValueError: there are not two packages.
    """
    packages = list(packages)
    if len(packages) < 2:
        raise ValueError(f"text: expected two packages or more, got {[package.name for package in packages]}")
    total = sum(package.size for package in packages)
    by_hash = sorted(packages, key=lambda package: hashlib.sha256(package.name.encode()).digest())
    small = [package for package in by_hash if package.size <= LARGEST_HELD_OUT * total]
    held_out, size = set[str](), 0
    for package in small or by_hash[:1]:
        if size < HELD_OUT * total:
            held_out.add(package.name)
            size += package.size
    train = [package for package in packages if package.name not in held_out]
    return train, [package for package in packages if package.name in held_out]


def without_known_files(train: Iterable[Package], held_out: Iterable[Package]) -> list[Package]:
    """Drop the files kept back of which :data:`KNOWN_LINES` stand in the text to learn from."""
    known = {line for package in train for file in package.files for line in _long_lines(file)}

    def is_new(file: bytes) -> bool:
        lines = _long_lines(file)
        return bool(lines) and sum(line in known for line in lines) < KNOWN_LINES * len(lines)

    new = [Package(package.name, list(filter(is_new, package.files))) for package in held_out]
    return [package for package in new if package.files]


def halves(packages: Iterable[Package]) -> tuple[list[Package], list[Package]]:
    """Split the files by their hash: what is chosen by one half is reported on the other."""
    first, second = list[Package](), list[Package]()
    for package in packages:
        for half, odd in ((first, 0), (second, 1)):
            files = [file for file in package.files if hashlib.sha256(file).digest()[0] % 2 == odd]
            half.append(Package(package.name, files))
    return first, second


def _long_lines(file: bytes) -> list[int]:
    return [hash(line) for line in map(bytes.strip, file.split(b"\n")) if len(line) >= 24]


def joined(packages: Iterable[Package]) -> Tensor:
    return torch.frombuffer(bytearray().join(text for package in packages for text in package.files), dtype=torch.uint8)


def read_text(roots: Sequence[Path], cache: Path) -> tuple[Corpus, dict[str, Any]]:
    """Read it, or what an earlier call has put into the file ``cache``; and say which packages it is of."""
    if not cache.exists():
        train, held_out = split_packages(read_packages(roots))
        held_out = without_known_files(train, held_out)
        about = {
            part: [[package.name, package.size] for package in packages]
            for part, packages in (("train", train), ("held_out", held_out))
        }
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")  # several may be started at once
        torch.save({"about": about, "train": joined(train), "validation": joined(held_out)}, temporary)
        temporary.replace(cache)
    stored = torch.load(cache)
    return Corpus(stored["train"], stored["validation"]), stored["about"]


def _read(file: Path) -> bytes:
    """Return the text of a file; nothing, of one that is too long or no text."""
    if file.stat().st_size > LONGEST_FILE:
        return b""
    text = file.read_bytes()
    return b"" if b"\0" in text else text
