"""One style for all figures: colours that colour-blind eyes tell apart, labels on the curves, a caption below."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.harness.growth import fit_power_law
from benchmarks.harness.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, STYLE

_LOOKS = {
    "NSA": (BLUE, "o"),
    "NSA with compression": (SKY, "D"),
    "dense": (ORANGE, "s"),
    "flash SDPA": (ORANGE, "s"),
    "cuDNN SDPA": (AMBER, "v"),
    "math SDPA": (GREEN, "^"),
    "dense Flex": (PURPLE, "P"),
    "three branches": (BLUE, "o"),
    "selected branch": (SKY, "D"),
}
COLOURS = {name: colour for name, (colour, _) in _LOOKS.items()}
MARKERS = {name: marker for name, (_, marker) in _LOOKS.items()}
_SETTINGS: Any = STYLE | {"figure.dpi": 100, "axes.titlesize": 10.5}
mpl.rcParams.update(_SETTINGS)


@dataclass(frozen=True)
class Label:
    """A curve's name, to be written next to its last point."""

    x: float
    y: float
    text: str
    colour: str


def figure(
    title: str,
    caption: str,
    *,
    size: tuple[float, float] = (7.6, 4.9),
    columns: int = 1,
    rows: int = 1,
    left: float = 0.95,
    widths: Sequence[float] | None = None,
) -> tuple[Figure, Any]:
    """Make a figure with a headline and a caption, and axes: one, or an array of several.

    Args:
        title: what is to be seen.
        caption: device, precision, shapes, commit; wrapped.
        size: inches.
        columns: axes side by side.
        rows: axes below each other.
        left: inches for what stands left of the axes.
        widths: of the columns, relative to each other; default: all alike.
    """
    width, height = size
    result = Figure(figsize=size)
    FigureCanvasAgg(result)
    lines = textwrap.wrap(caption, int(width * 17.4))
    result.text(0.1 / width, 0.1 / height, "\n".join(lines), fontsize=7.5, color=GREY, va="bottom", linespacing=1.35)
    result.text(0.1 / width, 1 - 0.12 / height, title, fontsize=12.5, fontweight="bold", va="top")
    axes = result.subplots(rows, columns, width_ratios=widths)
    result.subplots_adjust(
        left=left / width,
        right=1 - 0.2 / width,
        top=1 - (0.5 if columns == 1 else 0.75) / height,
        bottom=(0.155 * len(lines) + 0.7) / height,
        wspace=0.2,
        hspace=0.32,
    )
    return result, axes


def plot_curve(ax: Axes, name: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Draw one attention's curve in its colour; ours is the strongest line."""
    ours = name == "NSA"
    ax.plot(
        x, y, color=COLOURS[name], marker=MARKERS[name], markersize=5.5, linewidth=2.6 if ours else 1.6, zorder=3 + ours
    )


def length_axes(ax: Axes, lengths: Iterable[int], *, room: float) -> None:
    """Log-log axes over sequence lengths, with ``room`` for labels: the factor by which the axis is extended."""
    lengths = sorted(set(lengths))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [short(length) for length in lengths])
    ax.set_xticks([], minor=True)
    ax.set_xlim(lengths[0] * 0.85, lengths[-1] * room)
    ax.set_xlabel("sequence length S, tokens")
    ax.margins(y=0.1)


def label_curves(ax: Axes, labels: Sequence[Label]) -> None:
    """Write every label next to its point, moved up or down as far as others need room.

    Labels of curves that end early are above the last point, or next to an only one.
    """
    ax.figure.canvas.draw()
    last = max(label.x for label in labels)
    first = ax.get_xticks()[0]
    for label in labels:
        if label.x < last:
            alone = label.x == first
            ax.annotate(
                label.text,
                (label.x, label.y),
                xytext=(9, 0) if alone else (-6, 6),
                textcoords="offset points",
                ha="left" if alone else "right",
                va="center" if alone else "bottom",
                color=label.colour,
                bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
            )
    points_per_pixel = 72 / ax.figure.dpi
    late = sorted((label for label in labels if label.x == last), key=lambda label: label.y)
    wanted = [ax.transData.transform((label.x, label.y))[1] * points_per_pixel for label in late]
    heights = [11.5 * (1 + label.text.count("\n")) + 2 for label in late]
    for label, centre, place in zip(late, wanted, _spread(wanted, heights), strict=True):
        ax.annotate(
            label.text,
            (label.x, label.y),
            xytext=(9, place - centre),
            textcoords="offset points",
            va="center",
            color=label.colour,
        )


def _spread(centres: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Move ascending centres apart until boxes of these heights do not overlap, groups about their mean."""
    groups: list[tuple[list[int], float]] = []
    for index, centre in enumerate(centres):
        members, middle = [index], centre
        while groups:
            below, below_middle = groups[-1]
            gap = (sum(heights[i] for i in members) + sum(heights[i] for i in below)) / 2
            if middle - below_middle >= gap:
                break
            groups.pop()
            members = below + members
            middle = (below_middle * len(below) + middle * (len(members) - len(below))) / len(members)
        groups.append((members, middle))
    placed = [0.0] * len(centres)
    for members, middle in groups:
        bottom = middle - sum(heights[i] for i in members) / 2
        for i in members:
            placed[i] = bottom + heights[i] / 2
            bottom += heights[i]
    return placed


def residuals(curves: Mapping[str, Iterable[tuple[int, float]]]) -> str:
    """Return how exponents were fitted, and how far the worst point of each curve is from its own fit."""
    points = {name: list(curve) for name, curve in curves.items()}
    fits = {name: fit_power_law(curve) for name, curve in points.items() if len(curve) > 2}
    worst = ", ".join(f"{name} {fit.residual:.1%}" for name, fit in fits.items())
    return "Exponents: least squares in log-log" + (f"; worst point off by: {worst}." if worst else ".")


def with_exponent(name: str, curve: Collection[tuple[int, float]]) -> str:
    """Write a curve's name and its fitted exponent, if it has two points or more."""
    return f"{name}: S$^{{{fit_power_law(curve).exponent:.2f}}}$" if len(curve) > 1 else name


def sizes(nsa: Mapping[str, int]) -> str:
    """Write the sizes of the branches as captions do."""
    names = {"l": "compress_block_size", "d": "compress_stride", "l'": "select_block_size"}
    names |= {"n": "num_selected_blocks", "w": "window_size"}
    return ", ".join(f"{letter}={nsa[name]}" for letter, name in names.items())


def short(length: float) -> str:
    """Write 32768 as 32k."""
    return f"{length / 1024:.3g}k" if length >= 1024 else f"{length:g}"


def save(result: Figure, path: Path) -> str:
    """Write the figure as a PNG and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_suffix(".png")
    result.savefig(file, dpi=160)
    return str(file)
