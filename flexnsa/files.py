"""Small files that are whole whenever somebody looks."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one move.

    Raises:
        OSError: it cannot be written; names the file. What was there is still there.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
