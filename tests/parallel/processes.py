"""Processes that train together, started without a second import of torch, and never waited for without an end."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from flexnsa.lm.measure import process
from flexnsa.lm.parallel.joining import launch_variables

LIMIT = 300.0
"""Seconds after which a group that has not ended counts as hanging."""

PRELOAD = (
    "flexnsa.lm.cli.train",
    "flexnsa.lm.parallel.data_parallel",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "pytest",  # which modules with tests import
    "torch._dynamo.backends.debugging",  # what compiles takes seconds of every rank
    "torch._inductor.compile_fx",
)

_preload = forkserver.set_forkserver_preload


def import_for_all(modules: Sequence[str]) -> None:
    """Have the server of processes import what those of all tests need."""
    _preload([*modules, *PRELOAD])


@dataclass
class Group:
    """Started processes; what rank ``r`` prints goes to ``<folder>/output-<r>.txt``."""

    folder: Path
    processes: list[BaseProcess]

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return (self.folder / f"output-{rank}.txt").read_text()

    def outputs(self) -> str:
        """Return the last of what each rank has printed."""
        return "\n".join(f"rank {rank}: {self.output(rank)[-2000:]}" for rank in range(len(self.processes)))

    def wait(self) -> list[int | None]:
        """Return the exit statuses; a signal's is negative."""
        end = time.monotonic() + LIMIT
        for rank, rank_process in enumerate(self.processes):
            rank_process.join(max(0.0, end - time.monotonic()))
            assert not rank_process.is_alive(), f"rank {rank} hangs:\n{self.outputs()}"
        return [rank_process.exitcode for rank_process in self.processes]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that the processes bring about."""
        end = time.monotonic() + LIMIT
        while not is_so():
            assert any(rank_process.is_alive() for rank_process in self.processes), self.output(0)[-2000:]
            assert time.monotonic() < end, "nothing happens"
            time.sleep(0.005)


@contextmanager
def started(size: int, folder: Path, function: Callable[..., object], *arguments: Any) -> Iterator[Group]:
    """Start ``function(*arguments)`` in processes that see the variables of torchrun; none outlives the context."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    variables = [sizes | launched for launched in launch_variables(size)]
    jobs = [(folder / f"output-{rank}.txt", function, arguments) for rank in range(size)]
    with process.started(_run, jobs, preload=PRELOAD, variables=variables) as group:
        yield Group(folder, group.processes)


def run_together(
    size: int, folder: Path, function: Callable[..., object], *arguments: Any, status: int = 0
) -> list[str]:
    """Run to the end, which all ranks have to meet with this status; return what each has printed."""
    with started(size, folder, function, *arguments) as group:
        assert group.wait() == [status] * size, group.outputs()
        return list(map(group.output, range(size)))


def _run(_sender: Connection, output: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    process.redirect_output(output)
    faulthandler.dump_traceback_later(LIMIT - 5)  # says where it hangs
    torch.set_num_threads(1)
    function(*arguments)
