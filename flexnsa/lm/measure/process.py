"""Functions in processes of their own, which end with the function that started them: one that dies costs no other."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS = 60.0
"""Time that a process may take to start, on top of its limit."""
BEGUN = "begun"
"""Sent by a process that is ready: its time limit counts from then on."""
_DAY = 86_400.0


class Died(NamedTuple):
    """The end of a process, in place of a message."""

    exitcode: int


@dataclass(slots=True)
class Group:
    """Started processes, the connections on which they send, their time limit and when it is over."""

    processes: list[BaseProcess]
    receivers: list[Connection]
    seconds: float
    deadline: float

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Wait up to the deadline, and yield the number of a process with what it sends or, at its end, ``Died``."""
        running = {receiver: number for number, receiver in enumerate(self.receivers)}
        while running and (ready := wait(list(running), min(_DAY, self.deadline - time.monotonic()))):
            for receiver in ready:
                assert isinstance(receiver, Connection)
                number = running[receiver]
                try:
                    message = receiver.recv()
                except EOFError:
                    del running[receiver]
                    self.processes[number].join()
                    message = Died(self.processes[number].exitcode or 0)
                if message == BEGUN:
                    self.deadline = time.monotonic() + self.seconds
                else:
                    yield number, message


@contextmanager
def started(
    target: Callable[..., object],
    arguments: Sequence[tuple[Any, ...]],
    *,
    seconds: float = math.inf,
    preload: Sequence[str] = (),
    variables: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[Group]:
    """Start ``target(sender, *arguments[i])`` in process ``i``; when the context ends, kill what still runs.

    Ctrl-C does not reach the processes: the caller gets it, and ends them.

    Args:
        target: importable from its module.
        arguments: of each process; picklable.
        seconds: time limit of :meth:`Group.messages`, from when the processes have started.
        preload: modules. With any, processes are forked from a server that has imported them once, which saves seconds.
            Not for CUDA, which does not survive a fork.
        variables: of the environment, for each process. Without ``preload`` they are set before it loads any library.
    """
    context = multiprocessing.get_context("forkserver") if preload else multiprocessing.get_context("spawn")
    if preload:
        context.set_forkserver_preload(list(preload))
    group = Group([], [], seconds, time.monotonic() + START_SECONDS + seconds)
    try:
        for job, environment in zip(arguments, variables or [{}] * len(arguments), strict=True):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_begin, args=(sender, environment, target, job))
            with _inherited(environment):
                process.start()
            sender.close()
            group.processes.append(process)
            group.receivers.append(receiver)
        yield group
    finally:
        for process in group.processes:
            process.kill()
        for process, receiver in zip(group.processes, group.receivers, strict=True):
            process.join()
            receiver.close()


def _begin(
    sender: Connection, variables: Mapping[str, str], target: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(variables)
    target(sender, *arguments)


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables and block SIGINT for processes that are started inside the context."""
    resource_tracker.ensure_running()  # it starts with the first process, and unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def redirect_output(path: Path) -> None:
    """Write to a file what this process, and libraries in it, print from now on."""
    output = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
