"""Time of forward and of forward and backward against the length, and the length from which on NSA is faster."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness.growth import crossover
from benchmarks.harness.palette import GREY
from plots.records import NotRecordedError, Record, Results
from plots.style import COLOURS, Label, figure, label_curves, length_axes, plot_curve, residuals, short, with_exponent

NAMES = ("NSA", "cuDNN SDPA", "flash SDPA", "dense Flex", "math SDPA")
BOTH = ("forward_ms", "backward_ms")
PANELS = {"Forward": ("forward_ms",), "Forward and backward": BOTH}
Curves = dict[str, dict[int, float]]


def on_gpu(results: Results) -> Figure:
    """Medians over CUDA events."""
    return _draw(results.load("attention_h200.json"))


def on_cpu(results: Results) -> Figure:
    """Medians by the clock, all attentions in turn."""
    return _draw(results.load("cpu_throughput.json"))


def _draw(record: Record) -> Figure:
    caption = (
        f"Medians of attention alone, all in turn in one run; NSA's compressed keys are given. {record.shapes()}. "
        f"{residuals({name: curve.items() for name, curve in _curves(record, BOTH).items()})} {record.where()}."
    )
    result, axes = figure(_headline(record), caption, size=(11, 5), columns=2)
    for ax, (title, fields) in zip(axes, PANELS.items(), strict=True):
        _panel(ax, _curves(record, fields))
        ax.set_title(title)
    axes[0].set_ylabel("time")
    return result


def _headline(record: Record) -> str:
    curves = _curves(record, BOTH)
    ratio = _ratios(curves)
    if not ratio:
        raise NotRecordedError("The measurements hold no time of both NSA and a dense attention.")
    longest = max(ratio)
    dense = min((curve[longest], name) for name, curve in curves.items() if name != "NSA" and longest in curve)[1]
    times = f"{ratio[longest]:.1f} times as fast" if ratio[longest] >= 1 else f"{1 / ratio[longest]:.1f} times as slow"
    return f"Forward and backward, NSA is {times} as {dense} at S = {short(longest)}"


def _curves(record: Record, fields: tuple[str, ...]) -> Curves:
    return record.curves(*fields, names=NAMES, kind="whole")


def _ratios(curves: Curves) -> dict[int, float]:
    """By length, how many times NSA's time the fastest dense attention takes."""
    dense = [curve for name, curve in curves.items() if name != "NSA"]
    return {
        length: min(curve[length] for curve in dense if length in curve) / time
        for length, time in curves.get("NSA", {}).items()
        if any(length in curve for curve in dense)
    }


def _panel(ax: Axes, curves: Curves) -> None:
    lengths = [length for curve in curves.values() for length in curve]
    length_axes(ax, lengths, room=(max(lengths) / min(lengths)) ** 0.5)  # a third of the axis for labels
    for name, curve in curves.items():
        plot_curve(ax, name, list(curve), list(curve.values()))
    ax.margins(y=0.16)
    bottom, top = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / bottom < 100 else (1,)))
    ax.yaxis.set_major_formatter(FuncFormatter(_duration))
    ax.yaxis.set_minor_formatter(NullFormatter())
    _mark_crossover(ax, _ratios(curves))
    label_curves(
        ax,
        [
            Label(*list(curve.items())[-1], with_exponent(name, curve.items()), COLOURS[name])
            for name, curve in curves.items()
        ],
    )


def _mark_crossover(ax: Axes, ratio: dict[int, float]) -> None:
    where = crossover(ratio)
    if where is None:
        x, text = min(ratio), "some dense attention is faster\nat the greatest length"
    elif where == min(ratio):
        x, text = min(ratio), "NSA is faster than any of them\nat every length measured"
    else:
        x, text = where, f"NSA is faster than\nany of them from S = {where / 1024:.1f}k on"
        ax.axvline(where, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ax.annotate(
        text,
        (x, 0),
        xycoords=("data", "axes fraction"),
        xytext=(6, 5),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        color=GREY,
    )


def _duration(milliseconds: float, _: object = None) -> str:
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:g} s"
