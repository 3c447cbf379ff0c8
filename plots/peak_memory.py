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
    return _draw(record, record.curves("peak_mib", "inputs_mib", names=NAMES, kind="whole"))


def on_cpu(results: Results) -> Figure:
    """From every allocation on a CPU."""
    record = results.load("memory_training.json")
    return _draw(record, record.curves("peak_mib", names=NAMES))


def _draw(record: Record, found: dict[str, dict[int, float]]) -> Figure:
    curves = {name: [*curve.items()] for name, curve in found.items()}
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
