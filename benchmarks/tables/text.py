"""Bits per held-out byte of text."""

from __future__ import annotations

from functools import partial
from statistics import fmean, stdev

from benchmarks.learning.language import MODELS
from benchmarks.tables.points import Point, Rows, cells, points_by, read_record

DEFAULT = "NSA, rope 1e8, shared keys, begun as mean, indexer, residual"
SELECTED = {
    "dense": "dense",
    "NSA, the paper's settings": "NSA",
    "with an indexer": DEFAULT.removesuffix(", residual"),
    "text-125m": DEFAULT,
}
"""The models of docs/learning.md, by their names there."""
IDEAS = {
    "all heads, the default": "all heads of a group",
    "changes of rank 32 (`index_rank=32`)": "all heads, changes of rank 32",
    "a compressor for each key head": "all heads, a compressor for each key head",
    "3 of 6 heads": "3 index heads a key head, means of neighbouring queries plus a change",
    "2 heads": "2 index heads a key head",
    "2 heads, a key for every 4 tokens": "2 index heads a key head, keys of 4",
    "1 head": "1 index head a key head",
}


def runs_of(size: str) -> dict[tuple[int, str], list[Point]]:
    """Return the runs by steps and model, each with its seeds in order; more steps and earlier models first."""
    points, order = points_by("language_h200", "steps", "model", "seed", size=size), list(MODELS)
    runs: dict[tuple[int, str], list[Point]] = {}
    for steps, model, seed in sorted(points, key=lambda key: (-key[0], order.index(key[1]), key[2])):
        runs.setdefault((steps, model), []).append(points[steps, model, seed])
    return runs


def mean_of(seeds: list[Point], quantity: str) -> float:
    """Return the mean of a quantity after training."""
    return fmean(run["finals"][quantity]["mean"] for run in seeds)


def bits_by_seed(seeds: list[Point], count: int) -> list[str]:
    """Write the bits of the first seeds."""
    bits = {run["seed"]: f"{run['finals']['bits']['mean']:.4f}" for run in seeds}
    return [bits.get(seed, "-") for seed in range(count)]


def seconds(seeds: list[Point]) -> str:
    return f"{fmean(run['seconds'] for run in seeds):.0f}"


def gap(nsa: list[Point], dense: list[Point]) -> str:
    """Write the mean difference in bits of runs with the same seeds, and its standard error."""
    bits, baseline = ({run["seed"]: run["finals"]["bits"]["mean"] for run in runs} for runs in (nsa, dense))
    gaps = [bits[seed] - baseline[seed] for seed in bits]
    return f"{fmean(gaps):+.3f} ± {stdev(gaps) / len(gaps) ** 0.5:.3f}"


def octaves(seeds: list[Point]) -> list[float]:
    """Return mean bits of the first 64 bytes and of every doubling from there, recorded by halves from 128 on."""
    parts = [slice(0, 1), slice(1, 2), *(slice(half, half + 2) for half in range(2, 14, 2))]
    return [fmean(fmean(run["finals"]["bits"]["positions"][part]) for run in seeds) for part in parts]


def selected() -> Rows:
    runs, rows = runs_of("m7c-125m"), [["", "seed 0", "seed 1", "seed 2", "blocks found", "seconds"]]
    for label, name in SELECTED.items():
        seeds = runs[2000, name]
        recall = [fmean(map(fmean, run["selection"][-1][1])) for run in seeds if run.get("selection")]
        rows.append([label, *bits_by_seed(seeds, 3), f"{fmean(recall):.3f}" if recall else "-", seconds(seeds)])
    return rows


def by_seed(size: str) -> Rows:
    rows = [["", "parameters", "steps", "seconds", "bits per held-out byte, by seed"]]
    for (steps, name), seeds in runs_of(size).items():
        bits = ", ".join(bits_by_seed(seeds, seeds[-1]["seed"] + 1))
        rows.append([name, f"{seeds[0]['parameters'] / 1e6:.1f}M", f"{steps:,}", seconds(seeds), bits])
    return rows


def differences() -> Rows:
    rows = [["", "steps", "bits"]]
    for size, steps in (("m7c-125m", 2000), ("m7c-125m", 1000), ("small", 800)):
        runs = runs_of(size)
        rows.append(["NSA - dense", f"{steps:,}", gap(runs[steps, "NSA"], runs[steps, "dense"])])
    return rows


def by_context() -> Rows:
    bits = {name: octaves(seeds) for (steps, name), seeds in runs_of("m7c-125m").items() if steps == 2000}
    rows = [["", "0", "64", "128", "256", "512", "1k", "2k", "4k to 8k"]]
    rows += [[name, *cells(row, ".3f")] for name, row in bits.items()]
    gaps = (nsa - dense for nsa, dense in zip(bits["NSA"], bits["dense"], strict=True))
    return [*rows, ["NSA - dense", *cells(gaps, "+.3f")]]


def other_blocks() -> Rows:
    kinds = ("initial", "random", "forced")
    rows = [["", "steps", *kinds]]
    runs = [(size, *run) for size in ("m7c-125m", "small") for run in runs_of(size).items()]
    for size, (steps, name), seeds in runs:
        ended = [run for run in seeds if "bits with forced blocks" in run["finals"]]  # the time of others was up before
        if ended:
            own = mean_of(ended, "bits with own blocks")
            costs = (mean_of(ended, f"bits with {blocks} blocks") - own for blocks in kinds)
            rows.append([name if size == "m7c-125m" else f"{name}, small", f"{steps:,}", *cells(costs, "+.4f")])
    return rows


def indexers() -> Rows:
    runs = {row["idea"]: row for row in read_record("selection_ideas")["rows"] if row["seed"] == 0}
    rows = [["idea", "blocks found", "worst layer"]]
    for label, idea in IDEAS.items():
        look = next(look for look in runs[idea]["recall"] if look["step"] == 500)
        rows.append([label, *cells((look["mean"], look["worst"]), ".3f")])
    return rows


def equal_seconds() -> Rows:
    cards = {
        "": points_by("stages_h100", "model", "lr", "seed"),
        ", H200": points_by("stages_h200", "model", "lr", "seed"),
    }
    seeds = range(10)
    rows = [["", "learning rate", f"bits, seeds {seeds[0]} to {seeds[-1]}", "steps at 2k, 8k, 32k"]]
    for card, points in cards.items():
        ended = {key: point for key, point in points.items() if "report 32k" in point}
        for model, lr in sorted({key[:2] for key in ended}):
            runs = [ended[model, lr, seed] for seed in seeds if (model, lr, seed) in ended]
            bits = " ".join(f"{run['report 32k']['mean']:.4f}" for run in runs)
            steps = ", ".join(map(str, runs[0]["steps"]))
            rows.append([model.replace("nsa", "text-125m") + card, f"{lr:g}", bits, steps])
    return rows


TABLES = {
    "text": selected,
    "equal seconds at 32k": equal_seconds,
    "text by seed": partial(by_seed, "m7c-125m"),
    "text by seed, smaller models": partial(by_seed, "small"),
    "text, NSA - dense": differences,
    "text by context": by_context,
    "text with other blocks": other_blocks,
    "other indexers": indexers,
}
