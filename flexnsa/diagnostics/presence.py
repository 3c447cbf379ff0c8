"""Which ranks of a run are still there: each holds a lock that the system lets go of when its process ends."""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path
from typing import IO


def hold(file: IO[str]) -> None:
    """Hold an open file for as long as it is open; not where the file system knows no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_gone(path: Path) -> bool:
    """Tell whether nobody holds a file any more; False where that cannot be known."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
