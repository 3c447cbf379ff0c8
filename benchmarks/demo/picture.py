"""The demo's picture: learning, exactness, memory and time on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.demo.twins import TwinResult
from benchmarks.harness.growth import fit_power_law
from benchmarks.harness.palette import AMBER, BLUE, GREEN, GREY, ORANGE, STYLE
from benchmarks.harness.parity import ParityRow
from benchmarks.harness.scaling import ATTENTIONS, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"NSA": BLUE, "dense": ORANGE, "dense, wide": AMBER, "flash SDPA": ORANGE, "math SDPA": GREEN}


def draw(path: Path, twins: Sequence[TwinResult], parity: Sequence[ParityRow], points: Sequence[Point]) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 8.4), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12))
        FigureCanvasAgg(figure)
        title = "flexnsa: Native Sparse Attention and dense attention on a CPU"
        figure.suptitle(title, fontsize=13, x=0.02, ha="left")
        axes = figure.subplots(2, 2)
        draw_learning(axes[0, 0], twins)
        draw_parity(axes[0, 1], parity)
        draw_scaling(axes[1, 0], points, "peak_mib", "Peak memory of forward and backward", "MiB")
        draw_scaling(axes[1, 1], points, "seconds", "Time of forward and backward", "seconds of one core")
        figure.savefig(path, dpi=150)


def draw_learning(ax: Axes, twins: Sequence[TwinResult]) -> None:
    """Draw bits per byte over bytes of text: validation as marks, training as a smoothed line."""
    for twin in twins:
        x, y = zip(*twin.training_curve, strict=True)
        ax.plot([value / 1e3 for value in x], _smooth(y), color=COLOURS[twin.name], alpha=0.35, linewidth=1)
        x, y = zip(*twin.validation_curve, strict=True)
        label = f"{twin.name}: {twin.bits_per_byte:.3f}"
        marker = "o" if twin.name == "NSA" else "s"
        ax.plot([value / 1e3 for value in x], y, color=COLOURS[twin.name], marker=marker, markersize=4, label=label)
    ax.set(title="Learning Python's standard library", xlabel="thousand bytes of text", ylabel="bits per byte")
    ax.set_ylim(top=8.2)
    ax.legend(title="validation; pale: training", frameon=False)


def draw_parity(ax: Axes, rows: Sequence[ParityRow]) -> None:
    """Draw the error of every tensor and that of plain PyTorch."""
    tensors = list(dict.fromkeys(row.tensor for row in rows))
    for dtype, marker in zip(dict.fromkeys(row.dtype for row in rows), "os", strict=False):
        chosen = [row for row in rows if row.dtype == dtype]
        y = [tensors.index(row.tensor) for row in chosen]
        ax.scatter([row.plain_error for row in chosen], y, marker=marker, facecolors="none", edgecolors=GREY, s=55)
        ax.scatter([row.error for row in chosen], y, marker=marker, color=BLUE, s=16)
        centre = chosen[0].plain_error
        ax.annotate(dtype, (centre, -0.9), ha="center", color=GREY)
    ax.scatter([], [], marker="o", color=BLUE, s=16, label=f"flexnsa, impl={rows[0].impl!r}")
    ax.scatter([], [], marker="o", facecolors="none", edgecolors=GREY, s=55, label="plain PyTorch, same precision")
    ax.set_xscale("log")
    ax.set_yticks(range(len(tensors)), tensors)
    ax.set_ylim(len(tensors) - 0.4, -1.4)
    ax.set(title="Exact: output and every gradient", xlabel="largest error against the fp64 oracle, relative")
    ax.legend(frameon=False, loc="center")


def draw_scaling(ax: Axes, points: Sequence[Point], quantity: str, title: str, unit: str) -> None:
    """Draw a line per attention in log-log axes, with its fitted slope at the end."""
    lengths = sorted({point.seq_len for point in points})
    curves = {
        attention: [(point.seq_len, getattr(point, quantity)) for point in points if point.attention == attention]
        for attention in ATTENTIONS
    }
    highest = max(curve[-1][1] for curve in curves.values() if curve[-1][0] == lengths[-1])
    for (attention, curve), marker in zip(curves.items(), "^so", strict=True):
        x, y = zip(*curve, strict=True)
        ax.plot(x, y, color=COLOURS[attention], marker=marker, markersize=5, linewidth=1.8)
        ends_early = x[-1] < lengths[-1]  # other lines continue after its last point
        ax.annotate(
            f"{attention}\nslope {fit_power_law(curve).exponent:.2f}",
            (x[-1], y[-1]),
            xytext=(-9, 8) if ends_early else (8, 6 if y[-1] == highest else -6),
            ha="right" if ends_early else "left",
            va="center",
            textcoords="offset points",
            color=COLOURS[attention],
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{length / 1024:g}k" for length in lengths])
    ax.set_xlim(lengths[0] * 0.85, lengths[-1] * 2.1)
    ax.margins(y=0.12)
    ax.set(title=title, xlabel="sequence length", ylabel=unit)


def _smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    smoothed, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = weight * total + value, weight * mass + 1
        smoothed.append(total / mass)
    return smoothed
