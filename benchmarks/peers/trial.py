"""Try an implementation in a process of its own, before anything is timed: whether it is right, and at which lengths.

Compiled code goes to the caches that the measurement reads; a kernel that writes out of bounds ends this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.setting import Setting
from benchmarks.peers import ours
from benchmarks.peers.autotuned import compile_configs_at_once
from benchmarks.peers.problem import Adapter, Problem, head_major
from benchmarks.peers.table import TABLE

CHECKED_LENGTH = 2048
THREADS = 8
"""That compile, in each of several processes."""


def attempt(
    progress: Callable[[str], object], setting: Setting, kind: str, name: str, lengths: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Compare a selected branch with ours, then go forward and backward at every length, the shortest first.

    Returns:
        ``{"passed": lengths}``, those begun within the seconds; ``"difference"`` of a selected branch by tensor; and
        ``"label"`` if something failed.
    """
    result: dict[str, Any] = {"passed": []}
    started = time.monotonic()
    if setting.device == "cuda":
        compile_configs_at_once(THREADS)
    try:
        if kind == "selected":
            progress(f"{name} compared with flexnsa at {CHECKED_LENGTH}")
            result["difference"] = difference(TABLE[kind][name], Problem.draw(setting, CHECKED_LENGTH))
        for length in sorted(lengths):
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"over {seconds:.0f} s before {length} tokens")
            progress(f"{kind} of {name} at {length}")
            TABLE[kind][name](Problem.draw(setting, length)).run()
            if setting.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            result["passed"].append(length)
    except Exception as error:
        result["label"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def difference(adapter: Adapter, problem: Problem) -> dict[str, float]:
    """Largest difference from our selected branch, as a share of the largest value: of the output and gradients."""
    eager = replace(problem, setting=replace(problem.setting, backend=None))
    theirs, expected = results(adapter, problem), results(ours.selected, eager)
    return {
        name: ((theirs[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected
    }


def results(adapter: Adapter, problem: Problem) -> dict[str, Tensor]:
    """Output and gradients by q, k and v, fp32 ``(1, H, S, D)``."""
    workload = adapter(problem)
    out = workload.forward()
    is_head_major = out.shape == problem.q.shape
    upstream = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1)).to(out)
    upstream = upstream if is_head_major else upstream[0].transpose(0, 1).reshape(out.shape)
    tensors = [x.detach().float() for x in (out, *workload.backward(out, upstream)[:3])]
    named = zip(("out", "dq", "dk", "dv"), tensors, strict=True)
    return {name: x if is_head_major else head_major(x) for name, x in named}
