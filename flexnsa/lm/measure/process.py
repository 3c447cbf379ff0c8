"""Functions in processes of their own, which end with the function that started them.

So the memory of one measurement cannot hide in another's, and a process that hangs or dies costs no other.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""Time that a process may take to start, on top of its limit."""

Group = list[tuple[BaseProcess, Connection]]
"""Processes, each with the connection on which it sends."""


@contextmanager
def started(
    target: Callable[..., object],
    arguments: Sequence[tuple[Any, ...]],
    *,
    preload: Sequence[str] = (),
    variables: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[Group]:
    """Start ``target(sender, *arguments[i])`` in process ``i``; when the context ends, kill what still runs.

    Ctrl-C does not reach the processes: the caller gets it, and ends them.

    Args:
        target: importable from its module.
        arguments: of each process; picklable.
        preload: modules. With any, processes are forked from a server that has imported them once, which saves seconds.
            Not for CUDA, which does not survive a fork.
        variables: of the environment, for each process. Without ``preload`` they are set before it loads any library.
    """
    context = multiprocessing.get_context("forkserver") if preload else multiprocessing.get_context("spawn")
    if preload:
        context.set_forkserver_preload(list(preload))
    group: Group = []
    try:
        for number, own in enumerate(arguments):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(sender, *own))
            with _environment(variables[number] if variables else {}), _interrupts_held_back():
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


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes that are started inside the context."""
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
    """Block SIGINT, which processes that are started inside the context inherit."""
    resource_tracker.ensure_running()  # it starts with the first process, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def redirect_output(path: Path) -> None:
    """Write to a file what this process, and libraries in it, print from now on."""
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())


def run_fresh(
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    seconds: float,
    limit_memory: bool = True,
    preload: bool = False,
    report: Callable[[str], object] = lambda stage: None,  # noqa: ARG005
) -> dict[str, Any]:
    """Return the dict that ``function(progress, *arguments)`` returns, called in a new process.

    Args:
        function: importable from its module; calls ``progress(stage)`` with words for what it does next.
        *arguments: of the function; picklable.
        seconds: time limit of the function.
        limit_memory: let the process use at most 85 % of the free memory. Not for CUDA, which reserves more addresses
            than there is memory.
        preload: fork from a server that has imported the function's module, as in :func:`started`.
        report: called here with each stage.

    Returns:
        The function's dict; if there is none, ``{"label": why}``: over time, out of memory, or the error. The label of
        a point over time names its last stage, which tells slow from stuck.
    """
    preloaded = [function.__module__] if preload else []
    with started(_call, [(limit_memory, function, arguments)], preload=preloaded) as [(process, receiver)]:
        stage, since, end = "starting", time.monotonic(), time.monotonic() + START_SECONDS + seconds
        try:
            while receiver.poll(max(0.0, end - time.monotonic())):
                kind, value = receiver.recv()
                if kind == "result":
                    return value
                if kind == "begun":
                    end = time.monotonic() + seconds
                stage, since = value, time.monotonic()
                report(stage)
        except EOFError:
            process.join()
            return {"label": _death(process.exitcode, stage)}
        return {"label": f"over {seconds:.0f} s, {time.monotonic() - since:.0f} s of them in: {stage}"}


def _death(exitcode: int | None, stage: str) -> str:
    if exitcode == -signal.SIGKILL:  # by the system
        return f"out of memory, in: {stage}"
    return f"died with exit code {exitcode}, in: {stage}"


def _call(
    sender: Connection, limit_memory: bool, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    def progress(stage: str) -> None:
        sender.send(("stage", stage))

    if limit_memory:
        _limit_memory()
    sender.send(("begun", "starting"))
    try:
        result = function(progress, *arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
        result = {"label": "out of memory" if _is_out_of_memory(error) else reason}
    sender.send(("result", result))


def _limit_memory(share: float = 0.85) -> None:
    """Limit this process to a share of the free memory, so that the system need not kill another one for it."""
    info, own = Path("/proc/meminfo"), Path("/proc/self/status")
    if info.exists() and own.exists():
        limit = kilobytes(own, "VmSize") + share * kilobytes(info, "MemAvailable")
        resource.setrlimit(resource.RLIMIT_AS, (int(limit * 1024), resource.RLIM_INFINITY))


def kilobytes(file: Path, name: str) -> int:
    """Read a line such as ``VmRSS:  1234 kB`` of a file below /proc; 0 if there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    values = [line.split()[1] for line in lines if line.startswith(name + ":")]
    return int(values[0]) if values else 0


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )
