"""A case: a function that runs in processes of its own, in a folder that keeps what they print and how they end.

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
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from flexnsa.files import write_whole
from flexnsa.lm.checkpoint.checksum import sealed
from flexnsa.lm.checkpoint.lock import mark
from flexnsa.lm.diagnosis.environment import FILE_NAME, append_environment
from flexnsa.lm.diagnosis.stacks import ask_for_stacks, place_of_error, stacks_path
from flexnsa.lm.measure.process import START_SECONDS, Group, redirect_output, started
from flexnsa.lm.parallel.joining import launch_variables

OUTCOME = "outcome.json"
GRACE_SECONDS = 5.0
"""Time that the other ranks may take to end after one has failed."""
_STARTED = "started"


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


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a rank has ended.

    Args:
        reason: why it failed, or empty.
        at: time, on the clock that processes of a machine share.
        values: returned by its function.
    """

    reason: str
    at: float
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

    Writes ``environment.json``, ``log.rank-<r>.txt`` with all that rank ``r`` printed, ``stacks.rank-<r>.txt`` where it
    crashed or was over time, and at the end ``outcome.json``.

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
    mark(folder)
    for old in (folder / OUTCOME, *folder.glob("log.rank-*.txt"), *folder.glob(stacks_path(folder, "*").name)):
        old.unlink(missing_ok=True)
    start = time.monotonic()
    own = [{**(variables or {}), **launched} for launched in launch_variables(ranks)]
    threads = max(1, torch.get_num_threads() // ranks)
    jobs = [(folder, of_rank, threads, function, arguments) for of_rank in own]
    modules = [function.__module__, "flexnsa.lm.parallel.data_parallel"] if preload else []
    with started(_run_rank, jobs, preload=modules, variables=own) as group:
        endings = _endings(group, seconds)
        running = {rank: process.pid or 0 for rank, (process, _) in enumerate(group) if rank not in endings}
        places = {rank: ask_for_stacks(process, stacks_path(folder, rank)) for rank, process in running.items()}
    outcome = _outcome(endings, places, seconds, time.monotonic() - start)
    write_whole(folder / OUTCOME, sealed(asdict(outcome), indent=1))
    return outcome


def _endings(group: Group, seconds: float) -> dict[int, _Ending]:
    """Wait for the ranks up to the time limit; return how those ended that did."""
    endings: dict[int, _Ending] = {}
    running = {receiver: rank for rank, (_, receiver) in enumerate(group)}
    end = time.monotonic() + START_SECONDS + seconds
    while running and (ready := wait(list(running), max(0.0, end - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = running[receiver]
            try:
                message = receiver.recv()
            except EOFError:
                group[rank][0].join()
                message = _Ending(_death(group[rank][0].exitcode or 0), at=0.0)
            if message == _STARTED:
                end = time.monotonic() + seconds
                continue
            endings[rank] = message
            del running[receiver]
            if message.reason:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    return endings


def _outcome(endings: dict[int, _Ending], places: dict[int, str], limit: float, seconds: float) -> Outcome:
    where = "; ".join(f"rank {rank} in {place}" for rank, place in places.items())
    failed = {rank: ending for rank, ending in endings.items() if ending.reason}
    seconds = round(seconds, 2)
    if failed:
        # Blame killed ranks first (time 0), otherwise the earliest failure.
        first = min(failed, key=lambda rank: failed[rank].at)
        return Outcome("failed", f"rank {first}: {failed[first].reason}" + (f"; {where}" if where else ""), seconds, {})
    if places:
        return Outcome("over time", f"after {limit:g} s {where}", seconds, {})
    return Outcome("passed", "", seconds, endings[0].values or {})


def _death(exitcode: int) -> str:
    return f"died of {signal.Signals(-exitcode).name}" if exitcode < 0 else f"left with status {exitcode}"


def _run_rank(
    sender: Connection,
    folder: Path,
    variables: dict[str, str],
    threads: int,
    function: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
) -> None:
    """Call the function, then leave at once: the destructors of a process group may wait for other ranks."""
    threading.Thread(target=_leave_without_parent, daemon=True).start()
    os.environ.update(variables)
    rank = int(variables["RANK"])
    redirect_output(folder / f"log.rank-{rank}.txt")
    path = stacks_path(folder, rank)
    stacks = path.open("w")  # stays open as long as the process
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(threads)
    if rank == 0:
        append_environment(folder / FILE_NAME)
    sender.send(_STARTED)
    try:
        ending = _Ending("", time.monotonic(), function(*arguments))
    except (Exception, SystemExit) as error:
        ending = _Ending(_in_words(error), time.monotonic())
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


def _in_words(error: BaseException) -> str:
    """Describe an error, and where it was raised, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place_of_error(error)})"
