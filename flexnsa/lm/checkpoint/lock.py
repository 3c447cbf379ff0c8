"""Which process has a folder or a file: locks that the system releases when a process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flexnsa.files import FileError, named
from flexnsa.lm.checkpoint.log import LOG_NAME, is_log

LOCK_NAME = ".flexnsa.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. The locked file stays: removing it would let two runs in.

    Raises:
        FileError: another process has the folder.
    """
    path = folder / LOCK_NAME
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace").strip() or "of another user"
            message = f"{folder}: process {owner} is training here; wait for its end, or take another folder"
            raise FileError(message) from None
        except OSError as error:
            raise FileError(f"{path}: cannot be locked ({error.strerror}); take a folder on another disk") from error
        with named(path):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield


def is_of_a_run(folder: Path) -> bool:
    """Return whether a run or a diagnosis has written to a folder: it has a lock, or a log that was copied alone.

    Such a folder is not text to train on, for every start would change it.
    """
    log = folder / LOG_NAME
    return (folder / LOCK_NAME).exists() or (log.is_file() and is_log(log))


def hold(file: IO[str]) -> None:
    """Lock an open file for as long as it is open, where the file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_gone(path: Path) -> bool:
    """Return whether no process holds a file any more; False where the file system has no locks."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
