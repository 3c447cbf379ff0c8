"""A case: a function that runs in processes of its own, in a folder that keeps what they print.

Hanging or dying processes end with their case, so that what fails can be tried again with less in it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from flexnsa.lm.checkpoint.lock import LOCK_NAME
from flexnsa.lm.diagnosis.environment import FILE_NAME, append_environment
from flexnsa.lm.diagnosis.stacks import ask_for_stacks, place_of_error, stacks_path
from flexnsa.lm.measure.process import BEGUN, Died, redirect_output, started
from flexnsa.lm.parallel.joining import launch_variables

GRACE_SECONDS = 5.0
"""Time that the other ranks may take to end after one has failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case has ended.

    Args:
        status: ``"passed"``, ``"failed"`` or ``"over time"``.
        reason: the error of the rank that failed first, or where each rank was at the time limit; else empty.
        seconds: from the start of the processes to the end of the last.
        values: the dict that the function returned on rank 0.
    """

    status: Literal["passed", "failed", "over time"]
    reason: str
    seconds: float
    values: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether the function returned on every rank."""
        return self.status == "passed"


class _Ending(NamedTuple):
    """How a rank has ended: why it failed, when, and what its function returned."""

    reason: str
    time: float
    values: dict[str, Any] | None = None


def run_case(
    folder: Path,
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    ranks: int = 1,
    seconds: float,
    preload: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Call ``function(*arguments)`` in new processes, with the variables that torchrun sets; they divide the threads.

    Writes ``environment.json``, ``log.rank-<r>.txt`` with all that rank ``r`` printed, and where it crashed or was over
    time ``stacks.rank-<r>.txt``.

    Args:
        folder: of the case; files of an earlier case in it are removed.
        function: importable from its module; returns plain values that JSON can hold.
        *arguments: of the function; picklable.
        ranks: number of processes, all on this machine.
        seconds: time limit, from when all of them have started.
        preload: fork from a server that has imported the function's module once, which saves seconds of starting. Not
            for CUDA, which does not survive a fork.
        variables: of the environment of these processes. Libraries read many when they are loaded: without ``preload``
            they are set before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK_NAME).touch()  # it is not text to train on
    for old in (*folder.glob("log.rank-*.txt"), *folder.glob(stacks_path(folder, "*").name)):
        old.unlink()
    start = time.monotonic()
    environments = [{**(variables or {}), **launched} for launched in launch_variables(ranks)]
    jobs = [(folder, max(1, torch.get_num_threads() // ranks), function, arguments)] * ranks
    modules = [function.__module__, "flexnsa.lm.parallel.data_parallel"] if preload else []
    endings: dict[int, _Ending] = {}
    with started(_run_rank, jobs, seconds=seconds, preload=modules, variables=environments) as group:
        for rank, message in group.messages():
            if isinstance(message, Died):
                code = message.exitcode
                status = f"died of {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
                message = _Ending(status, time=0.0)
            endings.setdefault(rank, message)
            if endings[rank].reason:
                group.deadline = min(group.deadline, time.monotonic() + GRACE_SECONDS)
        running = {rank: process.pid or 0 for rank, process in enumerate(group.processes) if rank not in endings}
        places = {rank: ask_for_stacks(process, stacks_path(folder, rank)) for rank, process in running.items()}
    return _outcome(endings, places, seconds, time.monotonic() - start)


def _outcome(endings: dict[int, _Ending], places: dict[int, str], limit: float, seconds: float) -> Outcome:
    stuck = "; ".join(f"rank {rank} in {place}" for rank, place in places.items())
    failed = {rank: ending for rank, ending in endings.items() if ending.reason}
    seconds = round(seconds, 2)
    if failed:
        # Blame killed ranks first (time 0), otherwise the earliest failure.
        first = min(failed, key=lambda rank: failed[rank].time)
        return Outcome("failed", f"rank {first}: {failed[first].reason}" + (f"; {stuck}" if stuck else ""), seconds, {})
    if places:
        return Outcome("over time", f"after {limit:g} s {stuck}", seconds, {})
    return Outcome("passed", "", seconds, endings[0].values or {})


def _run_rank(
    sender: Connection, folder: Path, threads: int, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    """Call the function, then leave at once: the destructors of a process group may wait for other ranks."""
    threading.Thread(target=_leave_without_parent, daemon=True).start()
    rank = int(os.environ["RANK"])
    redirect_output(folder / f"log.rank-{rank}.txt")
    path = stacks_path(folder, rank)
    stacks = path.open("w")  # stays open as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(threads)
    if rank == 0:
        append_environment(folder / FILE_NAME)
    sender.send(BEGUN)
    try:
        ending = _Ending("", time.monotonic(), function(*arguments))
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())[:300]
        ending = _Ending(f"{type(error).__name__}: {words} ({place_of_error(error)})", time.monotonic())
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if path.stat().st_size == 0:
        path.unlink()
    sender.send(ending)
    os._exit(1 if ending.reason else 0)


def _leave_without_parent() -> None:
    """Leave when the process that started this one has been killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
