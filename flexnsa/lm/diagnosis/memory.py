"""The memory of steps: whether it grows from one to the next, and its peak under settings of the allocator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.diagnosis.recipe import Recipe
from flexnsa.lm.measure.memory import MIB, resident_bytes
from flexnsa.lm.measure.table import Report, format_table

WARM_UP = 0.25
"""Fraction of the steps in which caches, pools and workspaces may still grow."""
_POINTS = 200
_PEAKS = ("reserved_mib", "allocated_mib", "resident_mib")


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
        in_cuda = (torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)) if cuda else (None, None)
        samples.append(Sample(seconds, resident_bytes(), *in_cuda))
    return samples


def growth(values: Sequence[int]) -> float:
    """Fit the growth from one value to the next, the first quarter left out.

    It is the median of the slopes between any two (Theil 1950, Sen 1968): a pool that grows once does not change it; a
    leak does, whether it grows in every step or in a few.
    """
    warm = list(enumerate(values))[int(WARM_UP * len(values)) :]
    pairs = itertools.combinations(warm[:: -(-len(warm) // _POINTS)], 2)
    return median((b - a) / (at_b - at_a) for (at_a, a), (at_b, b) in pairs) if len(warm) > 1 else 0.0


def summarize(samples: Sequence[Sample], *, tokens: int, threshold: float, rank: int = 0) -> dict[str, Any]:
    """Summarize the samples of a rank, of steps with so many ``tokens`` on all ranks.

    Memory counts as growing above ``threshold`` MiB per step.
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
        samples, tokens = soak(trainer.train_step, steps, trainer.device), recipe.training.tokens_per_step
        summary = summarize(samples, tokens=tokens, threshold=threshold, rank=trainer.ranks.rank)
        return {"ranks": trainer.ranks.gather(summary)}


def report_growth(record: dict[str, Any]) -> Report:
    """Report where memory grows most, and that of each rank at the first step, after warm-up and at the last."""
    ranks = record["ranks"]
    worst = max(ranks, key=lambda rank: max(rank["mib_per_step"].values()))
    name, slope = max(worst["mib_per_step"].items(), key=lambda item: item[1])
    on_rank = f" on rank {worst['rank']}" if len(ranks) > 1 else ""
    rows = []
    for rank in ranks:
        samples = rank["samples"]
        for quantity, growth_mib in rank["mib_per_step"].items():
            sizes = [f"{samples[at][quantity] / MIB:,.1f}" for at in (0, int(WARM_UP * len(samples)), -1)]
            verdict = "grows" if quantity in rank["grows"] else "flat"
            rows.append([f"rank {rank['rank']}, {quantity}", *sizes, f"{growth_mib:+.3f}", verdict])
    limit = f"{worst['threshold_mib_per_step']:g} allowed"
    speed = f"{worst['tokens_per_second']:,.0f} tokens/s in the median of {worst['steps']} steps"
    return Report(
        sentence=f"{'grows' if worst['grows'] else 'flat'}: {name} memory grows by {slope:+.3f} MiB a step{on_rank} at "
        f"most, of {limit}; {speed}.",
        table=format_table(["memory in MiB", "step 0", "after warm-up", "last step", "a step", ""], rows),
        record=record,
        passed=not any(rank["grows"] for rank in ranks),
    )


def report_peaks(outcomes: Mapping[str, Outcome]) -> Report:
    """Report the setting with the lowest peak of the device's memory, or else the process's, and a line for each."""
    kinds = [kind for kind in _PEAKS if any(kind in outcome.values for outcome in outcomes.values())]
    rows = [
        [
            name,
            outcome.status,
            *(f"{outcome.values[kind]:,.1f}" if outcome.passed else "" for kind in (*kinds, "tokens_per_second")),
            outcome.reason,
        ]
        for name, outcome in outcomes.items()
    ]
    sentence = "no setting came to its end."
    peaks = {name: outcome.values for name, outcome in outcomes.items() if outcome.passed}
    if peaks:
        ordered = sorted(peaks, key=lambda name: peaks[name][kinds[0]])
        least, most = (peaks[ordered[at]] for at in (0, -1))
        speed = f"{least['tokens_per_second'] / most['tokens_per_second']:.2f} times the speed of {ordered[-1]}"
        sentence = (
            f"{kinds[0].removesuffix('_mib')} memory peaks lowest under {ordered[0]}: {least[kinds[0]]:,.0f} MiB at "
            f"{speed}, whose peak is {most[kinds[0]]:,.0f} MiB."
        )
    header = ["peak of the steps", "", *(f"{kind.removesuffix('_mib')} MiB" for kind in kinds), "tokens/s", "because"]
    return Report(
        sentence=sentence,
        table=format_table(header, rows),
        record={"settings": {name: asdict(outcome) for name, outcome in outcomes.items()}},
        passed=len(peaks) == len(outcomes),
    )
