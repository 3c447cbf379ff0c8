"""Held-out loss of a dense model that is converted and trained further, and of the same model without conversion."""

from __future__ import annotations

from math import log

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flexnsa.lm.measure.palette import GREY, ORANGE
from plots.records import Record, Results
from plots.style import COLOURS, MARKERS, Label, figure, label_curves, sizes

FIRST = "pretraining"
DENSE = "dense"
CONVERTED = ("three branches", "selected branch")


def draw(results: Results) -> Figure:
    """Left: bits per byte before the conversion and behind it. Right: what each is away from the dense model."""
    record = results.load("up_training_h200.json")
    runs = {point["name"]: _bits(point) for point in record.content["points"]}
    before = runs[FIRST][-1][0]
    result, (left, right) = figure(_headline(runs), _caption(record, before), size=(11, 4.7), columns=2)
    _losses(left, runs, before)
    _differences(right, runs)
    return result


def _losses(ax: Axes, runs: dict[str, list[tuple[int, float]]], before: int) -> None:
    first = [look for look in runs[FIRST] if look[0] >= before // 2]
    ax.plot(*zip(*first, strict=True), color=ORANGE, linewidth=1.8)
    labels: list[Label] = []
    for name in (DENSE, *CONVERTED):
        steps, bits = zip(*runs[name], strict=True)
        ax.plot([before + step for step in steps], bits, color=COLOURS[name], linewidth=1.8)
        labels.append(Label(before + steps[-1], bits[-1], name, COLOURS[name]))
    ax.axvline(before, color=GREY, linewidth=1)
    ax.annotate("converted", (before, ax.get_ylim()[1]), (-6, -4), textcoords="offset points", ha="right", va="top")
    ax.set(title="Held-out text", xlabel="step", ylabel="bits per byte")
    ax.set_xlim(before // 2 - 20, labels[0].x * 1.22)
    ax.set_ylim(bottom=ax.get_ylim()[0] - 0.06)
    label_curves(ax, labels)


def _differences(ax: Axes, runs: dict[str, list[tuple[int, float]]]) -> None:
    dense = dict(runs[DENSE])
    labels: list[Label] = []
    for name in CONVERTED:
        steps = [step for step, _ in runs[name]]
        differences = [bits - dense[step] for step, bits in runs[name]]
        ax.plot(steps, differences, color=COLOURS[name], marker=MARKERS[name], markersize=5, linewidth=1.8)
        labels.append(Label(steps[-1], differences[-1], name, COLOURS[name]))
    ax.axhline(0, color=ORANGE, linewidth=1.4)
    ax.set(title="Converted - dense, after equal steps", xlabel="steps since the conversion", ylabel="bits per byte")
    ax.set_xlim(-8, labels[0].x * 1.36)
    label_curves(ax, labels)


def _headline(runs: dict[str, list[tuple[int, float]]]) -> str:
    start = max(abs(runs[name][0][1] - runs[DENSE][0][1]) for name in CONVERTED)
    ends = f"{runs['three branches'][-1][1]:.3f} bits, dense {runs[DENSE][-1][1]:.3f}"
    return f"A conversion costs {start:.3f} bits per byte at once; three branches trained on: {ends}"


def _caption(record: Record, before: int) -> str:
    model, training, nsa = (record.content["setting"][name] for name in ("sizes", "training", "nsa"))
    return (
        f"A Llama of {model['num_hidden_layers']} layers of {model['hidden_size']}, {model['num_attention_heads']} "
        f"heads and {model['num_key_value_heads']} of keys, trained on bytes of Python's standard library for {before} "
        f"steps of {training['batch']} rows of {training['seq_len']:,}, then converted: "
        f"{sizes(nsa)}. AdamW anew for each, the same rows for all; "
        f"{training['held_out_rows']} held-out rows, one seed. {record.where()}."
    )


def _bits(point: dict) -> list[tuple[int, float]]:
    return [(step, nats / log(2)) for step, nats in point["held_out"]]
