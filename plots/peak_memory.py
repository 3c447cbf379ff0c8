"""The hero: peak memory of one forward and backward pass against the length, log-log, with fitted slopes."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from plots.records import NotRecordedError, Record, Results
from plots.style import COLOURS, Label, figure, label_curves, length_axes, plot_curve, residuals, short, with_exponent

NAMES = ("math SDPA", "flash SDPA", "dense Flex", "NSA")
Curve = list[tuple[int, float]]


def on_gpu(results: Results) -> Figure:
    """From the allocator of a GPU, which counts from after the inputs: they are added."""
    record = results.load("attention_h200.json")
    points = [point for point in record.points("whole") if "peak_mib" in point]
    curves = {
        name: [(p["seq_len"], p["peak_mib"] + p["inputs_mib"]) for p in points if p["name"] == name] for name in NAMES
    }
    return _draw(record, curves)


def on_cpu(results: Results) -> Figure:
    """From every allocation on a CPU."""
    record = results.load("memory_training.json")
    points = [point for point in record.points() if "peak_mib" in point]
    return _draw(record, {name: [(p["seq_len"], p["peak_mib"]) for p in points if p["name"] == name] for name in NAMES})


def _draw(record: Record, curves: dict[str, Curve]) -> Figure:
    curves = {name: curve for name, curve in curves.items() if curve}
    if "NSA" not in curves:
        raise NotRecordedError("The measurements hold no memory of NSA.")
    caption = (
        f"Most bytes allocated at once in one forward and backward pass of attention, inputs and gradients included. "
        f"{record.shapes()}. {residuals(curves)} {record.where()}."
    )
    result, ax = figure(_headline(curves), caption)
    length_axes(ax, [length for curve in curves.values() for length, _ in curve], room=2.6)
    for name, curve in curves.items():
        plot_curve(ax, name, *zip(*curve, strict=True))
    ax.set_ylabel("peak memory")
    ax.set_yscale("log", base=4)
    ax.yaxis.set_major_formatter(FuncFormatter(_size))
    label_curves(ax, [Label(*curve[-1], with_exponent(name, curve), COLOURS[name]) for name, curve in curves.items()])
    return result


def _headline(curves: dict[str, Curve]) -> str:
    nsa, math = dict(curves["NSA"]), dict(curves.get("math SDPA", []))
    shared = max(nsa.keys() & math.keys(), default=None)
    if shared is None:
        return "NSA: peak memory in training"
    return f"NSA trains in {math[shared] / nsa[shared]:.0f} times less memory than math SDPA at S = {short(shared)}"


def _size(mib: float, _: object = None) -> str:
    return f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:g} GiB"
