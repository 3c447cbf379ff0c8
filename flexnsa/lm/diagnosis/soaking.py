"""Many steps, one after the other: their speed, and whether memory grows from one to the next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from flexnsa.lm.diagnosis.recipe import Recipe
from flexnsa.lm.measure.memory import MIB, resident_bytes
from flexnsa.lm.measure.table import format_table

WARM_UP = 0.25
"""Fraction of the steps in which caches, pools and workspaces may still grow."""
_POINTS = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """Time and memory of a step.

    Args:
        seconds: duration of the step.
        resident: resident bytes of the process after it.
        allocated: bytes of CUDA memory in tensors; None on CPU, where PyTorch does not count.
        reserved: bytes of CUDA memory that PyTorch holds; None on CPU.
    """

    seconds: float
    resident: int
    allocated: int | None = None
    reserved: int | None = None


def soak(step: Callable[[], object], steps: int, device: torch.device) -> list[Sample]:
    """Take steps, and measure time and memory after each, which synchronizes."""
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        held = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) if cuda else (None, None)
        samples.append(Sample(seconds, resident_bytes(), *held))
    return samples


def growth(values: Sequence[int]) -> float:
    """Fit the growth from one value to the next, the first quarter left out.

    It is the median of the slopes between any two (Theil 1950, Sen 1968): a pool that grows once does not change it; a
    leak does, whether it grows in every step or in a few.
    """
    kept = list(enumerate(values))[int(WARM_UP * len(values)) :]
    kept = kept[:: -(-len(kept) // _POINTS)]
    pairs = itertools.combinations(kept, 2)
    return median((b - a) / (at_b - at_a) for (at_a, a), (at_b, b) in pairs) if len(kept) > 1 else 0.0


def report(samples: Sequence[Sample], *, tokens: int, threshold: float, rank: int = 0) -> dict[str, Any]:
    """Summarize the samples of a rank.

    Args:
        samples: samples of :func:`soak`.
        tokens: tokens of a step, on all ranks.
        threshold: growth in MiB per step above which memory counts as growing.
        rank: rank of the samples.
    """
    quantities = [name for name in ("allocated", "reserved", "resident") if getattr(samples[0], name) is not None]
    slopes = {name: growth([getattr(sample, name) for sample in samples]) / MIB for name in quantities}
    return {
        "rank": rank,
        "steps": len(samples),
        "tokens_per_second": tokens / median(sample.seconds for sample in samples[int(WARM_UP * len(samples)) :]),
        "threshold_mib_per_step": threshold,
        "mib_per_step": slopes,
        "grows": [name for name, slope in slopes.items() if slope > threshold],
        "samples": [asdict(sample) for sample in samples],
    }


def soak_recipe(recipe: Recipe, steps: int, threshold: float) -> dict[str, Any]:
    """Measure the steps of a trainer; a case."""
    with recipe.trainer() as trainer:
        samples = soak(trainer.train_step, steps, trainer.device)
        own = report(samples, tokens=recipe.training.tokens_per_step, threshold=threshold, rank=trainer.ranks.rank)
        return {"ranks": trainer.ranks.gather(own)}


def sentence(record: dict[str, Any]) -> str:
    """Report whether memory is flat, for the rank where it grows most."""
    ranks = record["ranks"]
    worst = max(ranks, key=lambda rank: max(rank["mib_per_step"].values()))
    speed = f"{worst['tokens_per_second']:,.0f} tokens/s in the median of {worst['steps']} steps"
    name, slope = max(worst["mib_per_step"].items(), key=lambda item: item[1])
    fitted = f"{name} memory grows by {slope:+.3f} MiB a step" + (f" on rank {worst['rank']}" if len(ranks) > 1 else "")
    limit = f"{worst['threshold_mib_per_step']:g}"
    return f"{'grows: ' if worst['grows'] else 'flat: '}{fitted} at most, of {limit} allowed; {speed}."


def table(record: dict[str, Any]) -> str:
    """Return a table of the memory of each rank at the first step, after warm-up and at the last."""
    rows = []
    for rank in record["ranks"]:
        samples = rank["samples"]
        for name, slope in rank["mib_per_step"].items():
            held = [samples[at][name] / MIB for at in (0, int(WARM_UP * len(samples)), -1)]
            verdict = "grows" if name in rank["grows"] else "flat"
            rows.append([f"rank {rank['rank']}, {name}", *(f"{mib:,.1f}" for mib in held), f"{slope:+.3f}", verdict])
    return format_table(["memory in MiB", "step 0", "after warm-up", "last step", "a step", ""], rows)


def has_grown(record: dict[str, Any]) -> bool:
    """Return whether memory grows on any rank."""
    return any(rank["grows"] for rank in record["ranks"])
