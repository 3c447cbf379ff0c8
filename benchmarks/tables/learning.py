"""What models learned, of text and of recall."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness.options import RESULTS

Point = dict[str, Any]
Rows = list[list[str]]


def read_points(name: str) -> list[Point]:
    """Return the points of a recording."""
    return json.loads((RESULTS / f"{name}.json").read_text())["points"]


def equal_seconds() -> Rows:
    """Bits per held-out byte of models that trained for equal seconds, by learning rate and seed."""
    runs: dict[tuple[str, float], dict[int, Point]] = {}
    ended = (point for point in read_points("stages_h100") if "report 32k" in point)
    for point in ended:
        runs.setdefault((point["model"].replace("nsa", "text-125m"), point["lr"]), {})[point["seed"]] = point
    seeds = sorted({seed for run in runs.values() for seed in run})
    rows = [["", "learning rate", *(f"seed {seed}" for seed in seeds), "steps at 2k, 8k, 32k"]]
    for (model, lr), run in sorted(runs.items()):
        bits = [f"{run[seed]['report 32k']['mean']:.4f}" if seed in run else "-" for seed in seeds]
        rows.append([model, f"{lr:g}", *bits])
        rows[-1].append(", ".join(map(str, run[min(run)]["steps"])))
    return rows


TABLES = {"equal seconds at 32k": equal_seconds}
