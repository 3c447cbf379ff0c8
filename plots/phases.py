"""Where NSA's time goes on a GPU: each phase's share, forward and backward, over the length."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.harness.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from plots.records import NotRecordedError, Record, Results
from plots.style import figure, short

PHASES = {
    "compress": SKY,
    "cmp branch": BLUE,
    "score and select": PURPLE,
    "slc branch": ORANGE,
    "win branch": GREEN,
    "gate": AMBER,
}
"""Those that make up the whole; the others are parts of one of these."""


def on_gpu(results: Results) -> Figure:
    """Stacked bars, forward and backward, one a length."""
    record = results.load("attention_h200.json")
    lengths = sorted({point["seq_len"] for point in record.points("phase")})
    if not lengths:
        raise NotRecordedError(
            "attention_h200.json has no phases; python -m benchmarks attention.gpu without --quick records them."
        )
    caption = (
        "Medians of each phase run alone, compiled; whole: NSA with compression in one compiled call, in the same run. "
        f"Selection has no backward. {record.shapes()}. {record.where()}."
    )
    height = 2.6 + 0.75 * len(lengths)
    result, axes = figure("Where the time goes", caption, size=(11, height), columns=2, left=1.35)
    result.subplots_adjust(top=1 - 1.1 / height, wspace=0.32)
    for ax, field in zip(axes, ("forward_ms", "backward_ms"), strict=True):
        _bars(ax, record, lengths, field)
        ax.set_title(field.removesuffix("_ms").capitalize())
    patches = [Patch(color=colour, label=name) for name, colour in PHASES.items()]
    result.legend(
        handles=patches, ncols=len(patches), frameon=False, loc="upper left", bbox_to_anchor=(0.0, 1 - 0.33 / height)
    )
    return result


def _bars(ax: Axes, record: Record, lengths: list[int], field: str) -> None:
    ticks = []
    for row, length in enumerate(lengths):
        times = {p["name"]: p.get(field, 0.0) for p in record.points("phase") if p["seq_len"] == length}
        total = sum(times.get(name, 0.0) for name in PHASES)
        left = 0.0
        for name, colour in PHASES.items():
            share = 100 * times.get(name, 0.0) / total
            ax.barh(row, share, left=left, color=colour, height=0.58, edgecolor="white", linewidth=0.8)
            if share > 6.5:
                ink = "white" if colour in (BLUE, ORANGE, GREEN) else "black"
                ax.text(left + share / 2, row, f"{share:.0f} %", ha="center", va="center", fontsize=8.5, color=ink)
            left += share
        whole = [p for p in record.points("whole") if p["seq_len"] == length and p["name"] == "NSA with compression"]
        measured = f"\nwhole: {whole[0][field]:.2f} ms" if whole and field in whole[0] else ""
        ticks.append(f"S = {short(length)}\nsum: {total:.2f} ms{measured}")
    ax.set_yticks(range(len(lengths)), ticks, fontsize=8.5)
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of the sum of phases, %")
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0, colors=GREY)
    ax.invert_yaxis()
