"""Stacks of a running process: in a file on request, and of one thread, to see whether it makes progress."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flexnsa.lm.training.trainer import Trainer


def stacks_path(folder: Path, rank: int | str) -> Path:
    """Return the path of a rank's stacks."""
    return folder / f"stacks.rank-{rank}.txt"


@contextmanager
def stacks_on_request(trainer: Trainer, folder: Path) -> Iterator[Callable[[], None]]:
    """Write the stacks of all threads to ``stacks.rank-<r>.txt`` at every SIGUSR1, even if the process hangs.

    A watcher of :func:`flexnsa.lm.training.run`; an empty file is removed at the end.
    """
    path = stacks_path(folder, trainer.ranks.rank)
    with path.open("a") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        try:
            yield lambda: None
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    if path.stat().st_size == 0:
        path.unlink()


def watch_thread(thread: int, seconds: float) -> tuple[bool, str]:
    """Return whether a thread's stack changes within the seconds, and its innermost position at their end."""
    samples = [_stack(thread)]
    for _ in range(20):
        time.sleep(seconds / 20)
        samples.append(_stack(thread))
    place = samples[-1][-1] if samples[-1] else "a thread that has ended"
    return any(sample != samples[0] for sample in samples), place


def ask_for_stacks(process: int, path: Path) -> str:
    """Have a process write its stacks to ``path``, as it does at SIGUSR1; return where its main thread is."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGUSR1)
    end = time.monotonic() + 3.0  # longer than it takes
    while (place := innermost_place(path)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return place or "a place that it does not tell"


def innermost_place(path: Path) -> str | None:
    """Read the innermost position of the main thread from a file of :mod:`faulthandler`; None if it is not complete."""
    stacks = path.read_text() if path.exists() else ""
    # Newer threads come first, each with its innermost frame first
    frames = re.findall(r"\(most recent call first\):\n  File \"(.+)\", line (\d+) in (.+)\n", stacks)
    if not frames or not stacks.splitlines()[-1].endswith(("<module>", "...")):
        return None
    file, line, function = frames[-1]
    return f"{Path(file).name}:{line}, {function}"


def place_of_error(error: BaseException) -> str:
    """Return the innermost position where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return _in_words(frames[-1]) if frames else "a place that it does not tell"


def _stack(thread: int) -> list[str]:
    """Return the positions on the stack of a thread, the outermost first."""
    frame = sys._current_frames().get(thread)
    return [] if frame is None else [_in_words(summary) for summary in traceback.extract_stack(frame)]


def _in_words(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}, {frame.name}"
