"""Memory and time of attention over the sequence length, each point in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness.clock import Clock
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.memory import saved_for_backward
from benchmarks.harness.setting import CPU
from benchmarks.harness.workloads import WHOLE
from flexnsa.lm.measure.memory import MIB, peak_resident_bytes

ATTENTIONS = ("math SDPA", "flash SDPA", "NSA")


@dataclass(frozen=True, slots=True)
class Point:
    """Memory and time of one forward and backward pass in fp32 on one CPU core."""

    attention: str
    seq_len: int
    peak_mib: float
    saved_mib: float
    seconds: float


def measure(attention: str, seq_len: int) -> Point:
    """Run forward and backward once, in a fresh process.

    The peak is that of the resident set, relative to before the inputs were made, so it includes inputs, outputs and
    gradients. Saved are the storages that autograd keeps between forward and backward. Seconds are processor time on
    one thread, which depends little on other processes.
    """
    figures = run_fresh(_measure_here, attention, seq_len, seconds=3600, preload=True)
    if "label" in figures:
        raise RuntimeError(f"{attention} at S={seq_len}: {figures['label']}")
    return Point(attention, seq_len, **figures)


def _measure_here(progress: Callable[[str], object], attention: str, seq_len: int) -> dict[str, float]:
    torch.set_num_threads(1)
    progress("warming up")
    _forward_backward(attention, 128)  # loads code and workspaces that any length needs
    before = peak_resident_bytes()
    progress("forward and backward")
    saved, seconds = _forward_backward(attention, seq_len)
    return {"peak_mib": (peak_resident_bytes() - before) / MIB, "saved_mib": saved / MIB, "seconds": seconds}


def _forward_backward(attention: str, seq_len: int) -> tuple[int, float]:
    """Return the bytes saved for backward, and seconds."""
    torch.manual_seed(0)
    workload = WHOLE[attention](CPU, seq_len)
    clock = Clock("thread")
    start = clock.start()
    with saved_for_backward([]) as saved:
        out = workload.forward()
    saved_bytes = saved.total
    workload.backward(out)
    return saved_bytes, clock.since(start) / 1e3
