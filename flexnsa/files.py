"""Small files that are whole whenever somebody looks."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one move; text is written as UTF-8.

    Raises:
        OSError: it cannot be written; names the file. What was there is still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
