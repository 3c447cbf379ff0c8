"""Processes that train together, started without a second import of torch, and never waited for without an end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flexnsa.lm.measure.process import redirect_output
from flexnsa.lm.parallel.joining import launch_variables

LIMIT = 300.0
"""Seconds after which a group that has not ended counts as hanging."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "flexnsa.lm.cli.train",
        "flexnsa.lm.parallel.data_parallel",
        "torch.distributed.checkpoint",
        "torch._dynamo.backends.debugging",  # what compiles takes seconds of every rank
        "torch._inductor.compile_fx",
    ]
)


class Group:
    """Started processes; what rank ``r`` prints goes to ``<folder>/output-<r>.txt``."""

    def __init__(self, size: int, folder: Path, function: Callable[..., object], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        sizes = {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        self.processes = [
            _CONTEXT.Process(target=_run, args=(sizes | launched, folder, function, arguments))
            for launched in launch_variables(size)
        ]
        for process in self.processes:
            process.start()

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far."""
        return (self.folder / f"output-{rank}.txt").read_text()

    def outputs(self) -> str:
        """Return the last of what each rank has printed."""
        return "\n".join(f"rank {rank}: {self.output(rank)[-2000:]}" for rank in range(len(self.processes)))

    def wait(self) -> list[int | None]:
        """Return the exit statuses; a signal's is negative."""
        end = time.monotonic() + LIMIT
        for rank, process in enumerate(self.processes):
            process.join(max(0.0, end - time.monotonic()))
            assert not process.is_alive(), f"rank {rank} hangs:\n{self.outputs()}"
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
    redirect_output(folder / f"output-{variables['RANK']}.txt")
    faulthandler.dump_traceback_later(LIMIT - 5)  # says where it hangs
    torch.set_num_threads(1)
    function(*arguments)
