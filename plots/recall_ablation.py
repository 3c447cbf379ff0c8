"""What one thing changed costs or gains at recall: every model and seed as a point."""

from __future__ import annotations

from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.harness.palette import BLUE, GREY, ORANGE
from plots.records import Results
from plots.style import figure, short

MARKS = {2048: ("o", BLUE, "as long as trained on"), 4096: ("x", ORANGE, "twice as long")}


def draw(results: Results) -> Figure:
    """A row of each model, points of its seeds at two lengths, a line at the mean of what all are compared with."""
    record = results.load("recall_ablation_h200.json")
    plan, found = record.content["plan"], dict[str, dict[int, list[float]]]()
    for point in record.content["points"]:
        for seq_len in MARKS:
            share = fmean(point["maps"]["pairs"][str(seq_len)]) / plan["map_rows"]
            found.setdefault(point["variant"], {}).setdefault(seq_len, []).append(share)
    names = sorted(found, key=lambda name: -fmean(found[name][max(MARKS)]))
    changed = next(iter(record.content["setting"]["models"]))
    seeds = sorted({len(shares) for lengths in found.values() for shares in lengths.values()})
    steps = sum(stage["steps"] for stage in plan["stages"])
    result, ax = figure(
        "Recalled of many pairs, one thing changed at a time",
        f"Lines, and the name in blue: what all others change; its MLP compresses, and learns at a tenth of the rate. "
        f"{plan['map_rows']} rows of a length, 16 depths, among {plan['map_pairs']} other pairs at most, after "
        f"{steps:,} steps on rows of {plan['stages'][0]['seq_len']} to {short(plan['stages'][-1]['seq_len'])} tokens; "
        f"{' to '.join(map(str, sorted({seeds[0], seeds[-1]})))} seeds of each. {record.where()}.",
        size=(8.6, 7.4),
        left=2.25,
    )
    for length, (marker, colour, meaning) in MARKS.items():
        points = [(share, row) for row, name in enumerate(names) for share in found[name][length]]
        x, y = zip(*points, strict=True)
        ax.scatter(x, y, marker=marker, color=colour, s=34, zorder=3, label=f"S = {short(length)}, {meaning}")
        ax.axvline(fmean(found[changed][length]), color=colour, linewidth=0.8, alpha=0.6)
    ax.set_yticks(range(len(names)), names)
    ax.get_yticklabels()[names.index(changed)].set_color(BLUE)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, 1.02)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    ax.grid(visible=True, axis="y", color=GREY, alpha=0.2)
    ax.legend(loc="upper left", frameon=False)
    return result
