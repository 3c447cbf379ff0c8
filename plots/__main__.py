"""Draw every figure whose measurements are recorded; name those that have none, and how to record them."""

from __future__ import annotations

import argparse
from pathlib import Path

from plots import (
    decoding,
    language,
    masks,
    mods,
    peak_memory,
    phases,
    recall,
    recall_ablation,
    roofline,
    step_time,
    throughput,
)
from plots.records import NotRecordedError, Results
from plots.style import save

FIGURES = {
    "peak_memory_gpu": peak_memory.on_gpu,
    "peak_memory_cpu": peak_memory.on_cpu,
    "step_time_gpu": step_time.on_gpu,
    "step_time_cpu": step_time.on_cpu,
    "phases_gpu": phases.on_gpu,
    "roofline_gpu": roofline.on_gpu,
    "training_gpu": throughput.on_gpu,
    "masks": masks.draw,
    "mods": mods.draw,
    "decoding_gpu": decoding.on_gpu,
    "recall_steps": recall.by_step,
    "recall_depths": recall.by_depth,
    "recall_ablation": recall_ablation.draw,
    "language": language.losses,
    "language_positions": language.positions,
}


def main() -> None:
    """Write a PNG of each figure."""
    parser = argparse.ArgumentParser(prog="python -m plots", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("plots/figures"), help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="FIGURE")
    options = parser.parse_args()
    for name in options.only:
        try:
            figure = FIGURES[name](Results(options.results))
        except NotRecordedError as missing:
            print(f"{name}: not made. {missing}")
            continue
        print(f"{name}: {save(figure, options.out / name)}")


if __name__ == "__main__":
    main()
