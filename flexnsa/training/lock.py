"""One run in a folder at a time: a lock that the operating system lets go of when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexnsa.errors import FileError

LOCK_NAME = ".flexnsa.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. The file that is locked stays: to remove it would let two in.

    Raises:
        FileError: another process has the folder.
    """
    path = folder / LOCK_NAME
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "of another user"
            message = f"{folder}: process {owner} is training here; wait for its end, or take another folder"
            raise FileError(message) from None
        except OSError as error:
            raise FileError(f"{path}: cannot be locked ({error.strerror}); take a folder on another disk") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
