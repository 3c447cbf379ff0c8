"""Recall of pairs that are scattered over a sequence."""

from __future__ import annotations

from operator import itemgetter
from statistics import fmean

from benchmarks.learning.sizes import SIZES
from benchmarks.tables.points import Point, Rows, cells, lengths, read_record

SELECTED = {
    "dense attention": "dense",
    "NSA, the default settings": "NSA, shared keys, begun as mean, slow, indexer, residual",
    "NSA, l = 4, d = 2": "NSA, slow, l=4 d=2",
    "NSA": "NSA, slow",
    "NSA without the selected branch": "NSA without selected",
    "NSA, one learning rate": "NSA",
}
"""The models of docs/learning.md, by their names there."""
GROWING = (
    "NSA",
    "NSA, shared keys",
    "NSA, begun as mean",
    "NSA, shared keys, begun as mean",
    "NSA, begun as mean, slow",
)
"""Models whose training is shown."""


def runs_of(size: str, recording: str) -> dict[str, list[Point]]:
    """Return the runs of each model by seed."""
    points = sorted(read_record(recording)["points"], key=itemgetter("seed"))
    runs = {name: [point for point in points if point["variant"] == name] for name in SIZES[size].variants}
    return {name: seeds for name, seeds in runs.items() if seeds}


def shares(seeds: list[Point], seq_len: int) -> list[float]:
    """Return the percentage of pairs, of 16 depths in 32 sequences, that each seed recalled."""
    return [sum(seed["maps"]["pairs"][f"{seq_len}"]) / (16 * 32 / 100) for seed in seeds]


def mean_shares(seeds: list[Point], sizes: tuple[int, ...]) -> list[str]:
    """Write the mean percentage over seeds at each length."""
    return cells((fmean(shares(seeds, seq_len)) for seq_len in sizes), ".1f")


def alone(seeds: list[Point], seq_len: int) -> str:
    """Write how many of 32 single pairs in filler each seed recalled."""
    return ", ".join(f"{sum(seed['maps']['needle'][f'{seq_len}'])}" for seed in seeds)


def last_looks(size: str, seed: Point, quantity: str) -> dict[int, float]:
    """Return a quantity in percent by length, at the last look."""
    looks = zip(SIZES[size].plan.looks(), seed[quantity], strict=False)
    return {length: 100 * share for (_, length), share in looks}


def selected() -> Rows:
    runs, sizes = runs_of("gpu", "recall_h200"), (1024, 4096, 16384, 65536)
    return [["", *lengths(sizes)], *([label, *mean_shares(runs[name], sizes)] for label, name in SELECTED.items())]


def by_length() -> Rows:
    sizes, far = SIZES["gpu"].plan.map_lengths, (16384, 32768, 65536)
    rows = [["", "seeds", *lengths(sizes), "alone in 16k", *lengths(far[1:])]]
    runs = runs_of("gpu", "recall_h200")
    for name, seeds in sorted(runs.items(), key=lambda run: -fmean(shares(run[1], far[0]))):
        rows.append([name, f"{len(seeds)}", *mean_shares(seeds, sizes), *(alone(seeds, k) for k in far)])
    return rows


def while_growing() -> Rows:
    runs, sizes = runs_of("gpu", "recall_h200"), (64, 128, 256, 512, 1024, 2048, 4096)
    rows = [["", *lengths(sizes)]]
    for run in (run for name in GROWING for run in runs[name]):
        recall, unscored = (last_looks("gpu", run, quantity) for quantity in ("recall", "unscored"))
        rows.append([f"{run['variant']}, seed {run['seed']}", *(f"{recall[k]:.0f}, {unscored[k]:.0f}" for k in sizes)])
    return rows


def one_change() -> Rows:
    rows = [["", "seeds", "32", "512", "1k", "2k", "lowest, 2k", "4k", "alone in 4k"]]
    for name, seeds in runs_of("ablation", "recall_ablation_h200").items():
        short = f"{fmean(last_looks('ablation', seed, 'recall')[32] for seed in seeds):.0f}"
        *near, far = mean_shares(seeds, (512, 1024, 2048, 4096))
        rows.append([name, f"{len(seeds)}", short, *near, f"{min(shares(seeds, 2048)):.1f}", far, alone(seeds, 4096)])
    return rows


def on_cpu() -> Rows:
    rows = [["", "seeds", "128", "256", "lowest, 256", "512", "1k"]]
    for name, seeds in runs_of("cpu", "recall_cpu").items():
        near, learned = mean_shares(seeds, (128, 256)), f"{min(shares(seeds, 256)):.1f}"
        rows.append([name, f"{len(seeds)}", *near, learned, *mean_shares(seeds, (512, 1024))])
    return rows


TABLES = {
    "recall": selected,
    "recall by length": by_length,
    "recall while sequences grow": while_growing,
    "recall, one change at a time": one_change,
    "recall on a CPU": on_cpu,
}
