"""What a process of a case does: keeps what is printed and where it stands, and says how its function has ended."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from flexnsa.diagnostics.environment import FILE_NAME, append_environment
from flexnsa.diagnostics.stacks import place_of_error, stacks_path

BEGUN = "begun"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank has ended.

    Args:
        reason: why it failed, or empty.
        at: moment, on the clock that processes of a machine share.
        values: of its function.
    """

    reason: str
    at: float
    values: dict[str, Any] | None = None


def run_rank(
    sender: Connection,
    folder: Path,
    variables: dict[str, str],
    threads: int,
    function: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
) -> None:
    """Call the function, and leave: what is left of a process group may wait for others in its destructors."""
    threading.Thread(target=_leave_without_parent, daemon=True).start()
    os.environ.update(variables)
    rank = int(variables["RANK"])
    _redirect_output(folder / f"log.rank-{rank}.txt")
    path = stacks_path(folder, rank)
    stacks = path.open("w")  # stays open as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(threads)
    if rank == 0:
        append_environment(folder / FILE_NAME)
    sender.send(BEGUN)
    try:
        ending = Ending("", time.monotonic(), function(*arguments))
    except (Exception, SystemExit) as error:
        ending = Ending(_in_words(error), time.monotonic())
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if path.stat().st_size == 0:
        path.unlink()
    sender.send(ending)
    os._exit(1 if ending.reason else 0)


def _leave_without_parent() -> None:
    """Leave when whoever started this process has ended, killed by a signal that let it end nothing else."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _redirect_output(path: Path) -> None:
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())


def _in_words(error: BaseException) -> str:
    """Say in a line what was raised, and where."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place_of_error(error)})"
