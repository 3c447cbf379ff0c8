"""Measure in a process of its own: one point's memory cannot hide in another's, and its death costs no other point."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""What a process may take to begin, on top of its limit."""


def run_fresh(
    function: Callable[..., dict[str, Any]],
    *arguments: Any,
    seconds: float,
    limit_memory: bool = True,
    preload: bool = False,
    report: Callable[[str], object] = lambda stage: None,  # noqa: ARG005
) -> dict[str, Any]:
    """Give the dict that ``function(progress, *arguments)`` returns, called in a new process.

    Args:
        function: importable from its module; calls ``progress(stage)`` with words for what it does next.
        *arguments: of the function; picklable.
        seconds: of which the function may use as many.
        limit_memory: let the process have no more than most of the memory that is free. Not for CUDA, which reserves
            more addresses than there is memory.
        preload: fork from a server that has imported the function's module once, which saves seconds of starting. Not
            for CUDA, which does not survive a fork.
        report: called here with each stage.

    Returns:
        The function's dict; if there is none, ``{"label": why}``: over time, out of memory, or the error. A point over
        time tells the stage it was in, because slow is not stuck.
    """
    context = multiprocessing.get_context("forkserver") if preload else multiprocessing.get_context("spawn")
    if preload:
        context.set_forkserver_preload([function.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, limit_memory, function, arguments), daemon=True)
    process.start()
    sender.close()
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
        return {"label": f"over {seconds:.0f} s, {time.monotonic() - since:.0f} s of them in: {stage}"}
    except EOFError:
        process.join()
        return {"label": _death(process.exitcode, stage)}
    finally:
        process.kill()
        process.join()


def _death(exitcode: int | None, stage: str) -> str:
    if exitcode == -signal.SIGKILL:
        return f"out of memory, in: {stage}"  # the system's way of saying so
    return f"died with exit code {exitcode}, in: {stage}"


def _call(
    send_to: Any, limit_memory: bool, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    def progress(stage: str) -> None:
        send_to.send(("stage", stage))

    if limit_memory:
        _limit_memory()
    send_to.send(("begun", "starting"))
    try:
        result = function(progress, *arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
        result = {"label": "out of memory" if _is_out_of_memory(error) else reason}
    send_to.send(("result", result))


def _limit_memory(share: float = 0.85) -> None:
    """Let this process have no more than a share of the memory that is free, so that no other has to die for it."""
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
