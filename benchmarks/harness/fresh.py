"""A measurement in a process of its own, so that its memory cannot hide in another's, and its death costs no other."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flexnsa.lm.measure.memory import kilobytes
from flexnsa.lm.measure.process import BEGUN, Died, started


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
    stage, since = "starting", time.monotonic()
    with started(_call, [(limit_memory, function, arguments)], seconds=seconds, preload=preloaded) as group:
        for _, message in group.messages():
            if isinstance(message, Died):
                return {"label": _death(message.exitcode, stage)}
            if isinstance(message, dict):
                return message
            stage, since = message, time.monotonic()
            report(stage)
    return {"label": f"over {seconds:.0f} s, {time.monotonic() - since:.0f} s of them in: {stage}"}


def _death(exitcode: int, stage: str) -> str:
    if exitcode == -signal.SIGKILL:  # by the system
        return f"out of memory, in: {stage}"
    return f"died with exit code {exitcode}, in: {stage}"


def _call(
    sender: Connection, limit_memory: bool, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    if limit_memory:
        _limit_memory()
    sender.send(BEGUN)
    sender.send("starting")
    try:
        result = function(sender.send, *arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
        result = {"label": "out of memory" if _is_out_of_memory(error) else reason}
    sender.send(result)


def _limit_memory(share: float = 0.85) -> None:
    """Limit this process to a share of the free memory, so that the system need not kill another one for it."""
    free = kilobytes(Path("/proc/meminfo"), "MemAvailable")
    if free:
        limit = kilobytes(Path("/proc/self/status"), "VmSize") + share * free
        resource.setrlimit(resource.RLIMIT_AS, (int(limit * 1024), resource.RLIM_INFINITY))


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )
