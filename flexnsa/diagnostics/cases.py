"""A case: a function run to its end by processes of its own, in a folder that keeps what they said and did.

Whatever goes wrong in it, a hang or a death included, ends with it; so what fails can be tried again with less in it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from flexnsa.diagnostics.rank_process import BEGUN, Ending, run_rank
from flexnsa.diagnostics.stacks import ask_for_stacks, stacks_path
from flexnsa.files import write_whole

OUTCOME = "outcome.json"
START_SECONDS = 60.0
"""What processes may take to begin, on top of the limit."""
GRACE_SECONDS = 5.0
"""What the other ranks may take to end after one has failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case has ended.

    Args:
        status: in one word or two.
        reason: what the rank that failed first said, or where each stood when the time was over; else empty.
        seconds: from the start of the processes to the end of the last.
        values: what the function gave on rank 0.
    """

    status: Literal["passed", "failed", "over time"]
    reason: str
    seconds: float
    values: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every rank came to its end."""
        return self.status == "passed"


def run_case(
    folder: Path,
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    ranks: int = 1,
    seconds: float,
    preload: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Call ``function(*arguments)`` in new processes, which find the variables that torchrun sets, and share threads.

    Writes ``environment.json``, ``log.rank-<r>.txt`` with all that rank ``r`` printed, ``stacks.rank-<r>.txt`` where it
    was asked where it stood, or crashed, and at last ``outcome.json``.

    Args:
        folder: of the case; what an earlier one has left there goes.
        function: importable from its module; gives plain values that JSON can hold.
        *arguments: of the function; picklable.
        ranks: processes, all on this machine.
        seconds: in which all of them have to end, once they have begun.
        preload: fork from a server that has imported the function's module once, which saves seconds of starting. Not
            for CUDA, which does not survive a fork.
        variables: of the environment, for the processes alone. Libraries read many when they are loaded: without
            ``preload`` they are there from the start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / OUTCOME, *folder.glob("log.rank-*.txt"), *folder.glob(stacks_path(folder, "*").name)):
        old.unlink(missing_ok=True)
    begun = time.monotonic()
    with _started(folder, function, arguments, ranks, preload, dict(variables or {})) as group:
        endings = _endings(group, seconds)
        places = _places(folder, {rank: group[rank][0].pid or 0 for rank in range(ranks) if rank not in endings})
    outcome = _outcome(endings, places, seconds, time.monotonic() - begun)
    write_whole(folder / OUTCOME, json.dumps(asdict(outcome), indent=1) + "\n")
    return outcome


_Group = list[tuple[Any, Connection]]
"""By rank, its process and what it says."""


@contextmanager
def _started(
    folder: Path,
    function: Callable[..., dict[str, Any]],
    arguments: tuple[Any, ...],
    ranks: int,
    preload: bool,
    variables: dict[str, str],
) -> Iterator[_Group]:
    """Start the processes of a case; none outlives the context."""
    context = multiprocessing.get_context("forkserver") if preload else multiprocessing.get_context("spawn")
    if preload:
        context.set_forkserver_preload([function.__module__, "flexnsa.distributed.data_parallel"])
    variables |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    threads = max(1, torch.get_num_threads() // ranks)
    group: _Group = []
    try:
        for rank in range(ranks):
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=run_rank, args=(sender, folder, own, threads, function, arguments))
            with _environment(own), _interrupts_held_back():
                process.start()
            sender.close()
            group.append((process, receiver))
        yield group
    finally:
        for process, _ in group:
            process.kill()
        for process, receiver in group:
            process.join()
            receiver.close()


def _endings(group: _Group, seconds: float) -> dict[int, Ending]:
    """Wait for the ranks, but not for ever; give how those ended that did."""
    endings: dict[int, Ending] = {}
    running = {receiver: rank for rank, (_, receiver) in enumerate(group)}
    end = time.monotonic() + START_SECONDS + seconds
    while running and (ready := wait(list(running), max(0.0, end - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = running[receiver]
            try:
                said = receiver.recv()
            except EOFError:
                group[rank][0].join()
                said = Ending(_death(group[rank][0].exitcode), at=0.0)
            if said == BEGUN:
                end = time.monotonic() + seconds
                continue
            endings[rank] = said
            del running[receiver]
            if said.reason:
                end = min(end, time.monotonic() + GRACE_SECONDS)
    return endings


def _places(folder: Path, running: dict[int, int]) -> dict[int, str]:
    """Ask those who still run where they stand."""
    return {rank: ask_for_stacks(process, stacks_path(folder, rank)) for rank, process in running.items()}


def _outcome(endings: dict[int, Ending], places: dict[int, str], limit: float, seconds: float) -> Outcome:
    stood = "; ".join(f"rank {rank} in {place}" for rank, place in places.items())
    failed = {rank: ending for rank, ending in endings.items() if ending.reason}
    seconds = round(seconds, 2)
    if failed:
        # Who died said nothing, and whoever waited for it said so; else the first is where it began.
        first = min(failed, key=lambda rank: failed[rank].at)
        return Outcome("failed", f"rank {first}: {failed[first].reason}" + (f"; {stood}" if stood else ""), seconds, {})
    if places:
        return Outcome("over time", f"after {limit:g} s {stood}", seconds, {})
    return Outcome("passed", "", seconds, endings[0].values or {})


def _death(exitcode: int) -> str:
    return f"died of {signal.Signals(-exitcode).name}" if exitcode < 0 else f"left with status {exitcode}"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: a terminal sends it to all, and who started these ends them."""
    resource_tracker.ensure_running()  # starts with the first process, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
