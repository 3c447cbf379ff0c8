"""How near each phase is to what the device can do: measured time, and the least that its work takes there."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.palette import GREY
from benchmarks.kernels.roofline import H200, Point, points
from plots.phases import PHASES
from plots.records import Results
from plots.style import figure, short


def on_gpu(results: Results) -> Figure:
    """A bar for every phase at the greatest length, forward and backward, filled as far as it could not be shorter."""
    record = results.load("attention_h200.json")
    found = [point for point in points(record.content, H200) if point["name"] in PHASES]
    length = max(point["seq_len"] for point in found)
    caption = (
        f"S = {short(length)}. Pale: medians of each phase run alone, compiled. Full: what its work takes at the "
        f"device's peak, by what takes longest: products at {H200.flops / 1e12:.0f} TFLOP/s, or memory at "
        f"{H200.bytes / 1e12:.1f} TB/s for the bytes that its kernels move as they are built. A large product of "
        f"PyTorch reaches {H200.product / H200.flops:.0%}, a copy {H200.copy / H200.bytes:.0%}. "
        f"{record.shapes()}. {record.where()}."
    )
    result, axes = figure("How far from the roof", caption, size=(11, 4.3), columns=2, left=1.35)
    names = [name for name in PHASES if any(point["name"] == name for point in found)]
    for ax, which in zip(axes, ("forward", "backward"), strict=True):
        timed = {p["name"]: p for p in found if p["seq_len"] == length and p["pass"] == which}
        _bars(ax, names, timed)
        ax.set_title(which.capitalize())
    axes[1].tick_params(labelleft=False)
    return result


def _bars(ax: Axes, names: list[str], timed: dict[str, Point]) -> None:
    longest = max(point["ms"] for point in timed.values())
    for row, name in enumerate(names):
        if name not in timed:
            ax.text(0.01 * longest, row, "none", va="center", fontsize=8.5, color=GREY)
            continue
        point, colour = timed[name], PHASES[name]
        ax.barh(row, point["ms"], color=colour, alpha=0.3, height=0.62)
        ax.barh(row, point["floor_ms"], color=colour, height=0.62)
        text = f"{point['ms']:.1f} ms, {point['floor_ms'] / point['ms']:.0%}: {point['bound']}"
        ax.text(point["ms"] + 0.015 * longest, row, text, va="center", fontsize=8.5)
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_xlim(0, 1.55 * longest)
    ax.set_xlabel("ms")
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
