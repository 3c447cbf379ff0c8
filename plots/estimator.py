"""The closed-form estimate against the measured memory, of a whole model: every row a point on the diagonal."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexnsa.lm.measure.palette import BLUE, GREY, ORANGE
from plots.records import NotRecordedError, Record, Results
from plots.style import figure, short

QUANTITIES = {
    "after forward": ("after_forward", "estimated_after_forward", BLUE, "o"),
    "peak": ("peak", "estimated_peak", ORANGE, "s"),
}


def on_cpu(results: Results) -> Figure:
    """Of every allocation on a CPU."""
    return _draw(results.load("earlier_nsa.json"))


def on_gpu(results: Results) -> Figure:
    """Of the caching allocator of a GPU."""
    return _draw(results.load("estimator_h200.json"))


def _draw(record: Record) -> Figure:
    """Left: both, log-log. Right: by how much the estimate is off, row by row."""
    points = [point for point in record.points() if "after_forward" in point]
    if not points:
        raise NotRecordedError("The recording has no measured memory.")
    points.sort(key=lambda point: point["peak"])
    errors = [abs(point[e] / point[m] - 1) for point in points for m, e, _, _ in QUANTITIES.values()]
    caption = (
        "Decoder language models (large: width 768, 12 query and 2 key heads of 64; small: width 128), fp32 but where "
        f"bf16 is named (autocast), B=1, forward and backward, parameters and gradients included. Band: within 10 %. "
        f"{record.where()}."
    )
    off = f"{100 * max(errors):.1f} %"
    title = f"Memory is known before it is taken: {len(points)} models and lengths, off by {off} at most"
    height = max(5.0, 1.6 + 0.32 * len(points))
    result, (left, right) = figure(title, caption, size=(11, height), columns=2)
    _diagonal(left, points)
    _errors(right, points)
    result.subplots_adjust(wspace=0.45, top=1 - 0.6 / height)
    return result


def _diagonal(ax: Axes, points: list[dict[str, Any]]) -> None:
    for name, (measured, estimated, colour, marker) in QUANTITIES.items():
        x, y = [point[measured] for point in points], [point[estimated] for point in points]
        ax.scatter(x, y, color=colour, marker=marker, s=26, label=name, zorder=3)
    values = [point[field] for point in points for field in ("after_forward", "peak")]
    ends = [min(values) * 0.7, max(values) * 1.4]
    ax.plot(ends, ends, color=GREY, linewidth=1)
    ax.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#e4e4e4", linewidth=0)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, MiB", ylabel="estimated, MiB")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] / ends[0] < 100 else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:,g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.legend(frameon=False, loc="upper left")


def _errors(ax: Axes, points: list[dict[str, Any]]) -> None:
    rows = range(len(points))
    ax.axvspan(-10, 10, color="#eeeeee", linewidth=0)
    ax.axvline(0, color=GREY, linewidth=1)
    widest = 12.0
    for lower, (measured, estimated, colour, marker) in zip((-0.14, 0.14), QUANTITIES.values(), strict=True):
        off = [100 * (point[estimated] / point[measured] - 1) for point in points]
        widest = max(widest, 1.1 * max(map(abs, off)))
        ax.scatter(off, [row - lower for row in rows], color=colour, marker=marker, s=26, zorder=3)
    ax.set_yticks(rows, [_name(point) for point in points], fontsize=8.5)
    ax.set_xlim(-widest, widest)
    ax.set_xlabel("estimate above or below measured, %")


def _name(point: dict[str, Any]) -> str:
    precision = "" if point.get("precision", "fp32") == "fp32" else f", {point['precision']}"
    return f"{point['preset']}, {point['layers']} layers, {short(point['seq_len'])}{precision}"
