"""Files that are replaced in one move, so that a process that ends half-way leaves what was there before; errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileError(ValueError):
    """A file or folder cannot be used as asked; nothing was changed.

    The message names the file, what is wrong with it, and what to do.
    """


class FileWarning(UserWarning):
    """A file was used although something about it is unusual; the message names the file and says what."""


def temporary_of(path: Path) -> Path:
    """Return the path that :func:`replaced` writes to first."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def replaced(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Replace a file or a folder by what the context writes to the path that it gets.

    Args:
        path: the name. A folder that has it already has to be removed inside the context.
        sync: have a file on the disk before it gets the name, so that a power failure leaves one of the two whole.

    Raises:
        OSError: the file cannot be written; names ``path``. What was there is still there.
    """
    temporary = temporary_of(path)
    with named(path):
        yield temporary
        if sync:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)


def write_whole(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Replace a file as :func:`replaced` does; text is written as UTF-8."""
    with replaced(path, sync=sync) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def read_whole(path: Path) -> bytes:
    """Read a file, but not a device or a pipe, which may have no end.

    Raises:
        OSError: it cannot be read, or is not a file; names it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "expected a file, got a device or a pipe", str(path))
    return path.read_bytes()


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add the name of a file to an OSError; the error of a full disk names none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
