"""The points of the benchmark suite: which attention, how long, how many heads to a group, in which precision."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.attention.memory import MAKERS, allocated, resident
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.layers import LAYERS, PEER
from benchmarks.harness.phases import PHASES
from benchmarks.harness.setting import Setting, large
from benchmarks.harness.workloads import Workload

Extent = Literal["smoke", "quick", "full"]
BASELINES = ("flash SDPA", "math SDPA")
ATTENTIONS = ("NSA", "NSA with compression", *BASELINES, "dense Flex")
CPU_PHASES = ("compress", "cmp branch", "score and select", "slc branch", "win branch", "gate")
QUADRATIC = ("math SDPA", PEER)
LONGEST_QUADRATIC = {"cpu": 4096, "cuda": 8192}
"""Beyond, the scores of these alone would take gigabytes; their curves are known by then."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point: an attention or a phase of ours, of 12 query heads, ``group`` of which share a key head."""

    name: str
    seq_len: int
    group: int = 6
    dtype: str = "float32"
    device: str = "cpu"

    def __str__(self) -> str:
        """Name the test; runs are compared by it."""
        return f"{self.name.replace(' ', '_').replace(':', '')}-S{self.seq_len}-G{self.group}-{self.dtype}"

    def setting(self) -> Setting:
        """Shapes, device and implementation."""
        base = large(self.device)
        return replace(base, num_kv_heads=base.num_heads // self.group, dtype=getattr(torch, self.dtype))

    def workload(self) -> Workload:
        """Function and inputs."""
        torch._dynamo.reset()  # few versions of one function may be compiled, and every case makes its own
        torch.manual_seed(0)
        return MAKERS[self.name](self.setting(), self.seq_len)

    def obstacle(self) -> str | None:
        """Return why there is nothing to measure, if so."""
        if self.device == "cpu" and self.name == "dense Flex":
            return "FlexAttention has no backward on a CPU"
        return None

    def memory(self, seconds: float) -> dict[str, Any]:
        """MiB saved and at the peak; or ``{"label": why}``, of which nothing else dies.

        On a CPU in a process of its own, its resident set watched too; on CUDA by the allocator, in this one.
        """
        if self.device == "cpu":
            return run_fresh(_memory_on_cpu, self, seconds=seconds)
        torch._dynamo.reset()
        try:
            return allocated(lambda stage: None, self.name, self.seq_len, self.setting())  # noqa: ARG005
        except torch.OutOfMemoryError:
            return {"label": "out of memory"}
        finally:
            torch.cuda.empty_cache()


def cases(extent: Extent, device: str) -> list[Case]:
    """List the points of a run, every one once, short ones first."""
    chosen = dict.fromkeys(_cases(extent, device))
    affordable = [case for case in chosen if case.name not in QUADRATIC or case.seq_len <= LONGEST_QUADRATIC[device]]
    return sorted(affordable, key=lambda case: case.seq_len)


def _cases(extent: Extent, device: str) -> Iterator[Case]:
    dtype = "float32" if device == "cpu" else "bfloat16"
    phases = CPU_PHASES if device == "cpu" else tuple(name for name in PHASES if not name.startswith("fla"))
    if device == "cuda" and importlib.util.find_spec("fla"):
        phases = (*phases, "fla: selected branch")
    lengths = {
        ("smoke", "cpu"): (128,),
        ("quick", "cpu"): (1024, 2048, 8192),
        ("full", "cpu"): (1024, 2048, 4096, 8192, 16384),
        ("smoke", "cuda"): (1024,),
        ("quick", "cuda"): (8192, 32768),
        ("full", "cuda"): (8192, 16384, 32768, 65536),
    }[extent, device]
    for name in (*ATTENTIONS, *phases, *LAYERS):
        for length in lengths:
            yield Case(name=name, seq_len=length, dtype=dtype, device=device)
    if extent == "smoke":
        return
    # Other groups and precisions, at one length in the quick set.
    for length in lengths if extent == "full" else lengths[1:2]:
        for name in ("NSA", *BASELINES):
            for group in (1, 12):
                yield Case(name=name, seq_len=length, group=group, dtype=dtype, device=device)
            for other in ("bfloat16", "float32"):
                if (name, other, device) != ("flash SDPA", "float32", "cuda"):  # it takes half precision only
                    yield Case(name=name, seq_len=length, dtype=other, device=device)


def _memory_on_cpu(progress: Callable[[str], object], case: Case) -> dict[str, float]:
    arguments = (case.name, case.seq_len, case.setting())
    return resident(progress, *arguments) | allocated(progress, *arguments)
