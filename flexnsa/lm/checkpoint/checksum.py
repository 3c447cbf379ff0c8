"""Checksums inside the files that they protect: a JSON field, ``"checksum": "crc32:0123abcd"``.

The eight digits are the CRC-32 of all bytes, computed with zeros in their position. So content and checksum are written
together and always agree, and other tools that read JSON or safetensors find one more field.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

FIELD = "checksum"
ZEROS = "crc32:00000000"
"""Value of the field before :func:`seal`."""

_HEAD = 2**16
"""Number of bytes in which the field of a checkpoint has to be; that of a record may be anywhere."""
_DIGITS = re.compile(rb'"checksum": ?"crc32:([0-9a-f]{8})"')


def seal(file: BinaryIO, head: int = _HEAD) -> None:
    """Replace the :data:`ZEROS` of a file, which is open for reading and writing, by its checksum."""
    start = _find_digits(file, head)
    digits = _crc_without_digits(file, start)
    file.seek(start)
    file.write(digits)


def check(file: BinaryIO, head: int = _HEAD) -> None:
    """Compare a file with its checksum.

    Args:
        file: open for reading.
        head: number of bytes at the start of the file in which the field has to be.

    Raises:
        ValueError: they differ, or there is no checksum.
    """
    start = _find_digits(file, head)
    checksum = _crc_without_digits(file, start)
    file.seek(start)
    if checksum != file.read(len(checksum)):
        raise ValueError("its checksum disagrees with its content")


def checksum_of(path: Path) -> str:
    """Return the checksum of a file that has no field for it."""
    with path.open("rb") as file:
        return f"crc32:{_crc(file, 0):08x}"


def sealed(record: dict[str, Any], indent: int | None = None) -> bytes:
    """Return a JSON object with its checksum as its last field."""
    file = io.BytesIO(json.dumps(record | {FIELD: ZEROS}, indent=indent).encode())
    seal(file, head=len(file.getvalue()))
    return file.getvalue()


def unsealed(data: bytes) -> dict[str, Any]:
    """Decode what :func:`sealed` returned.

    Raises:
        ValueError: the content differs from its checksum, has none, or is not a JSON object.
    """
    check(io.BytesIO(data), head=len(data))
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("expected a JSON object")
    record.pop(FIELD, None)
    return record


def _find_digits(file: BinaryIO, head: int) -> int:
    file.seek(0)
    digits = _DIGITS.search(file.read(head))
    if digits is None:
        raise ValueError("its checksum is missing or damaged")
    return digits.start(1)


def _crc_without_digits(file: BinaryIO, start: int) -> bytes:
    file.seek(0)
    crc = zlib.crc32(file.read(start) + b"0" * 8)
    file.seek(start + 8)
    return f"{_crc(file, crc):08x}".encode()


def _crc(file: BinaryIO, crc: int) -> int:
    """Continue a CRC-32 with what is left of a file."""
    while part := file.read(2**20):
        crc = zlib.crc32(part, crc)
    return crc
