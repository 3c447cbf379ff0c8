"""Processes that train together, started without a second import of torch, and never waited for without an end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LIMIT = 120.0
"""Seconds after which a group that has not ended counts as hanging."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["flexnsa.cli.train", "flexnsa.distributed.data_parallel", "torch.distributed.checkpoint"]
)


class Group:
    """Started processes; what rank ``r`` prints goes to ``<folder>/output-<r>.txt``."""

    def __init__(self, size: int, folder: Path, function: Callable[..., object], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        names = sizes | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        self.processes = [
            _CONTEXT.Process(
                target=_run,
                args=(names | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, folder, function, arguments),
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def output(self, rank: int) -> str:
        """Give what a rank has printed so far."""
        return (self.folder / f"output-{rank}.txt").read_text()

    def wait(self) -> list[int | None]:
        """Give the exit statuses; a signal's is negative."""
        end = time.monotonic() + LIMIT
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, end - time.monotonic()))
            assert not process.is_alive(), f"rank {rank} hangs:\n{self.output(rank)[-2000:]}"
        return [process.exitcode for process in self.processes]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that the processes bring about."""
        end = time.monotonic() + LIMIT
        while not is_so():
            assert any(process.is_alive() for process in self.processes), self.output(0)[-2000:]
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.005)


@contextmanager
def started(size: int, folder: Path, function: Callable[..., object], *arguments: Any) -> Iterator[Group]:
    """Start ``function(*arguments)`` in processes that see the variables of torchrun; none outlives the context."""
    group = Group(size, folder, function, *arguments)
    try:
        yield group
    finally:
        for process in group.processes:
            process.kill()
            process.join()


def run_together(size: int, folder: Path, function: Callable[..., object], *arguments: Any) -> None:
    """Run to the end, which has to be a good one."""
    with started(size, folder, function, *arguments) as group:
        statuses = group.wait()
        assert statuses == [0] * size, "\n".join(group.output(rank)[-3000:] for rank in range(size))


def _run(variables: dict[str, str], folder: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    output = os.open(folder / f"output-{variables['RANK']}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    faulthandler.dump_traceback_later(LIMIT - 5)  # says where it hangs
    torch.set_num_threads(1)
    function(*arguments)
