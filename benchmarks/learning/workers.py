"""Many trainings side by side on one machine: a queue of jobs, each in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch

Point = dict[str, Any]
Job = dict[str, Any]
Place = dict[str, str]
"""Variables of the environment that a process is started with, such as the GPU that it sees."""
Report = Callable[[Point], object]
Work = Callable[[Job, Report], object]
"""Do a job and report points on the way; it is named by the module that defines it, for it is sent to processes."""


def places(workers: int, device: str) -> list[Place]:
    """Return the environments of so many processes on each visible GPU, or of as many on the CPU."""
    if device != "cuda":
        return [{}] * workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return [{"CUDA_VISIBLE_DEVICES": gpu} for _ in range(workers) for gpu in gpus]


def run_jobs(
    work: Work, jobs: Sequence[Job], places: Sequence[Place], report: Report, *, until: float = math.inf
) -> None:
    """Do all jobs, as many at a time as there are places, and report what they report from this process alone.

    No job begins once ``time.time()`` is ``until``; those that have begun know for themselves when to stop.
    A job that fails costs no other: a point ``job | {"label": why}`` is reported in the place of what it had to say.
    """
    threads = max(1, (os.cpu_count() or 1) // (2 * len(places)))
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # each would start as many as there are cores
        os.environ.setdefault(variable, str(threads))
    # With variables of its own a process reads them when it imports; without, it is forked where that is done.
    context = multiprocessing.get_context("spawn") if any(places) else multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    points: multiprocessing.Queue[Point] = context.Queue()
    waiting, free, running = list(jobs), list(places), list[tuple[Job, Place, BaseProcess]]()
    while waiting or running:
        if time.time() >= until:
            waiting.clear()
        while waiting and free:
            job, place = waiting.pop(0), free.pop(0)
            os.environ.update(place)  # what a process is started with; this one itself has no use for a GPU
            process = context.Process(target=_run_job, args=(work, job, points), daemon=True)
            process.start()
            running.append((job, place, process))
        ended = [entry for entry in running if not entry[2].is_alive()]
        _report_all(points, report)
        for job, place, process in ended:
            running.remove((job, place, process))
            free.append(place)
            if process.exitcode not in (0, 1):  # with 1 it has said why
                report(job | {"label": f"ended with exit code {process.exitcode}"})


def _report_all(points: multiprocessing.Queue[Point], report: Report) -> None:
    """Report what is there, and wait a moment for more."""
    while True:
        try:
            report(points.get(timeout=0.3))
        except queue.Empty:
            return


def _run_job(work: Work, job: Job, points: multiprocessing.Queue[Point]) -> None:
    try:
        work(job, points.put)
    except Exception as error:
        points.put(job | {"label": f"{type(error).__name__}: {str(error).strip()[:300]}"})
        raise
