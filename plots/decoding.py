"""One decoded token against the context: bytes of keys and values read, and time on a GPU."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.harness.palette import BLUE, ORANGE
from plots.records import Record, Results
from plots.style import Label, figure, label_curves, length_axes, plot_curve, short

Curves = dict[str, dict[int, float]]
LENGTHS = [2**power for power in range(10, 18)]


def on_gpu(results: Results) -> Figure:
    """Time as measured: attention alone, each step one CUDA graph, by batch size; the caption adds the layer."""
    record = results.load("decode_h200.json")
    times = {part: _graphs(record, part) for part in ("attention", "layer")}
    setting, largest = record.content["setting"], max(times["attention"])
    layers = ", ".join(
        f"{_compared(curves)} dense at batch {batch}" for batch, curves in sorted(times["layer"].items())
    )
    caption = (
        f"Attention of one token, {setting['num_heads']} query and {setting['num_kv_heads']} key heads of "
        f"{setting['head_dim']}, {setting['dtype'].removeprefix('torch.')}; each step a CUDA graph, second-level cache "
        f"cold; medians. The whole layer, {setting['dim']} wide, is {layers}, at the longest context. {record.where()}."
    )
    longest = short(max(times["attention"][largest]["NSA"]))
    compared = _compared(times["attention"][largest])
    title = f"Decoding {largest} rows of {longest} tokens, NSA's attention is {compared} flash SDPA"
    result, axes = figure(title, caption, size=(11, 5), columns=len(times["attention"]))
    measured = [ms for batch in times["attention"].values() for curve in batch.values() for ms in curve.values()]
    for ax, (batch, curves) in zip(axes, sorted(times["attention"].items()), strict=True):
        labels = []
        for name, curve in curves.items():
            contexts = sorted(curve)
            plot_curve(ax, name, contexts, [curve[context] for context in contexts])
            labels.append(Label(contexts[-1], curve[contexts[-1]], name, BLUE if name == "NSA" else ORANGE))
        length_axes(ax, [context for curve in curves.values() for context in curve], room=3.2 if ax is axes[0] else 1.4)
        ax.set_xlabel("context, tokens")
        ax.set_title(f"batch {batch}")
        ax.set_ylim(min(measured) / 1.4, max(measured) * 1.4)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(_time) if ax is axes[0] else NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        if ax is axes[0]:
            label_curves(ax, labels)
    axes[0].set_ylabel("time of a token")
    return result


def _time(ms: float, _: float) -> str:
    return f"{ms:g} ms" if ms >= 1 else f"{1000 * ms:g} µs"


def _graphs(record: Record, part: str) -> dict[int, Curves]:
    """Milliseconds of graph replays by batch, name and context."""
    times: dict[int, Curves] = {}
    for point in record.content["points"]:
        if "graph_ms" in point and point["part"] == part and point["name"] in ("NSA", "flash SDPA"):
            curve = {int(context): ms for context, ms in point["graph_ms"].items()}
            times.setdefault(point["batch"], {})[point["name"]] = curve
    return times


def _compared(curves: Curves) -> str:
    longest = max(curves["NSA"])
    ratio = curves["flash SDPA"][longest] / curves["NSA"][longest]
    return f"{ratio:.1f} times as fast as" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as"
