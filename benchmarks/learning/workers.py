"""Many trainings side by side on one machine: a queue of jobs, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

Point = dict[str, Any]
Job = dict[str, Any]
Report = Callable[[Point], object]
Work = Callable[[Job, Report], object]
"""Do a job and report points on the way; it is named by the module that defines it, for it is sent to processes."""


def run_jobs(work: Work, jobs: Sequence[Job], workers: int, report: Report) -> None:
    """Do all jobs, so many at a time, and report what they report from this process alone.

    A job that fails costs no other: a point ``job | {"label": why}`` is reported in the place of what it had to say.
    """
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # as many processes as cores would each start
        os.environ.setdefault(variable, "1")
    context = multiprocessing.get_context("spawn")
    points: multiprocessing.Queue[Point] = context.Queue()
    waiting, running = list(jobs), list[tuple[Job, BaseProcess]]()
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop(0)
            process = context.Process(target=_run_job, args=(work, job, points), daemon=True)
            process.start()
            running.append((job, process))
        ended = [(job, process) for job, process in running if not process.is_alive()]
        _report_all(points, report)
        for job, process in ended:
            running.remove((job, process))
            if process.exitcode != 0:
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
