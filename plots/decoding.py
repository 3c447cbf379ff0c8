"""One decoded token against the context: bytes of keys and values read, and time on a GPU."""

from __future__ import annotations

from dataclasses import asdict

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from flexnsa.lm import preset
from flexnsa.lm.estimate import estimate_decoding
from flexnsa.lm.measure.palette import BLUE, ORANGE
from flexnsa.lm.measure.recording import git_commit
from plots.records import Record, Results
from plots.style import Label, figure, label_curves, length_axes, plot_curve, short, sizes

Curves = dict[str, dict[int, float]]
LENGTHS = [2**power for power in range(10, 18)]


def draw(results: Results) -> Figure:  # noqa: ARG001
    """Bytes in closed form: NSA and dense attention, per layer of the ``large`` preset, and their ratio at the end."""
    model = preset("large", num_layers=1)
    tokens = [estimate_decoding(model, seq_len=length) for length in LENGTHS]
    read = [token.bytes_read / 2**20 for token in tokens]
    dense = [token.dense_bytes_read / 2**20 for token in tokens]
    nsa = model.nsa
    caption = (
        f"One layer, {model.num_kv_heads} key heads of {model.head_dim}, bf16, B=1; {sizes(asdict(nsa))}. "
        f"Closed form of flexnsa.lm.estimate, not a measurement; commit {git_commit()}."
    )
    ratio = dense[-1] / read[-1]
    title = f"After {LENGTHS[-1] // 1024}k tokens, decoding reads {ratio:.1f} times less than dense attention"
    result, ax = figure(title, caption)
    length_axes(ax, LENGTHS, room=2.6)
    ax.set_xlabel("context, tokens")
    ax.plot(LENGTHS, dense, color=ORANGE, marker="s", markersize=5.5, linewidth=1.6)
    ax.plot(LENGTHS, read, color=BLUE, marker="o", markersize=5.5, linewidth=2.6)
    ax.set_ylabel("keys and values read")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda mib, _: f"{mib:g} MiB"))
    label_curves(
        ax,
        [Label(LENGTHS[-1], dense[-1], "dense", ORANGE), Label(LENGTHS[-1], read[-1], "NSA", BLUE)],
    )
    return result


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
