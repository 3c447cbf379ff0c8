"""Training loss of NSA and of dense attention on the same text, and how far apart they are at every step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flexnsa.lm.measure.palette import BLUE, GREY
from plots.records import NotRecordedError, Record, Results
from plots.style import COLOURS, MARKERS, Label, figure, label_curves, sizes

MARK_SIZES = {"NSA": 4.5, "dense": 8.5}  # they may lie on each other
HIGHEST_LOSS = 4.6  # before, both learn which bytes there are
SMOOTH_OVER = 25
"""Steps to either side; one step is one sequence, and sequences differ more than models."""


def draw(results: Results) -> Figure:
    """Left: losses, every seed pale. Right: their difference, step by step on the same bytes."""
    record = results.load("trained.json")
    points = record.points()
    seeds = sorted(set.intersection(*({p["seed"] for p in points if p["name"] == name} for name in MARK_SIZES)))
    if not seeds:
        raise NotRecordedError(
            "trained.json has no seed of both models; python -m benchmarks learning.trained records them."
        )
    runs = {
        name: [p for seed in seeds for p in points if (p["name"], p["seed"]) == (name, seed)] for name in MARK_SIZES
    }
    result, (left, right) = figure(_headline(runs), _caption(record, runs), size=(11, 4.9), columns=2)
    for name, column in runs.items():
        _losses(left, name, column, record.content["training"]["seq_len"])
    left.set(title="Loss", ylabel="bits per byte", xlabel="text seen, thousand bytes")
    left.set_ylim(top=HIGHEST_LOSS)
    last = max(step for step, _ in runs["NSA"][0]["held_out"]) * record.content["training"]["seq_len"] / 1000
    left.set_xlim(0, last * 1.3)
    label_curves(left, [Label(last, _final(column), name, COLOURS[name]) for name, column in runs.items()])
    _difference(right, runs, record.content["training"]["seq_len"])
    return result


def _losses(ax: Axes, name: str, runs: Sequence[dict], seq_len: int) -> None:
    for run in runs:
        curve = _smooth(run["loss"])
        ax.plot(_text(len(curve), seq_len), curve, color=COLOURS[name], linewidth=0.8, alpha=0.3)
    curve = _smooth([fmean(column) for column in zip(*(run["loss"] for run in runs), strict=True)])
    ax.plot(_text(len(curve), seq_len), curve, color=COLOURS[name], linewidth=2)
    steps = [step for step, _ in runs[0]["held_out"]]
    means = [fmean(column) for column in zip(*([bits for _, bits in run["held_out"]] for run in runs), strict=True)]
    x = [step * seq_len / 1000 for step in steps]
    marks = {"marker": MARKERS[name], "markersize": MARK_SIZES[name], "markeredgecolor": "white"}
    ax.plot(x, means, color=COLOURS[name], linewidth=0, zorder=5 - MARK_SIZES[name] / 10, **marks)


def _difference(ax: Axes, runs: dict[str, list[dict]], seq_len: int) -> None:
    pairs = zip(runs["NSA"], runs["dense"], strict=True)
    differences = [[a - b for a, b in zip(nsa["loss"], dense["loss"], strict=True)] for nsa, dense in pairs]
    for difference in differences:
        curve = _smooth(difference)
        ax.plot(_text(len(curve), seq_len), curve, color=BLUE, linewidth=0.8, alpha=0.35)
    curve = _smooth([fmean(column) for column in zip(*differences, strict=True)])
    ax.plot(_text(len(curve), seq_len), curve, color=BLUE, linewidth=2)
    ax.axhline(0, color=GREY, linewidth=1)
    for nsa, dense in zip(runs["NSA"], runs["dense"], strict=True):
        for (step, bits), (_, other) in zip(nsa["held_out"], dense["held_out"], strict=True):
            ax.plot(step * seq_len / 1000, bits - other, "o", color=BLUE, markersize=5, alpha=0.75, linewidth=0)
    late = [value for difference in differences for value in _smooth(difference)[len(curve) // 6 :]]
    widest = 1.6 * max(map(abs, late))
    ax.set_ylim(-widest, widest)
    for place, word in ((0.97, "NSA worse"), (0.03, "NSA better")):
        ax.text(
            0.98, place, word, transform=ax.transAxes, ha="right", va="top" if place > 0.5 else "bottom", color=GREY
        )
    ax.set(title="NSA - dense, on the same bytes", ylabel="bits per byte", xlabel="text seen, thousand bytes")


def _headline(runs: dict[str, list[dict]]) -> str:
    nsa, dense = (_final(runs[name]) for name in ("NSA", "dense"))
    gaps = [a["held_out"][-1][1] - b["held_out"][-1][1] for a, b in zip(runs["NSA"], runs["dense"], strict=True)]
    told_apart = len(gaps) > 2 and abs(fmean(gaps)) > 2 * stdev(gaps) / len(gaps) ** 0.5
    verdict = ("NSA learns more" if nsa < dense else "NSA learns less") if told_apart else "NSA learns as much"
    return f"From equal text, {verdict}: {nsa:.2f} bits per held-out byte, dense attention {dense:.2f}"


def _caption(record: Record, runs: dict[str, list[dict]]) -> str:
    model, training = record.content["setting"]["models"]["NSA"], record.content["training"]
    gaps = [a["held_out"][-1][1] - b["held_out"][-1][1] for a, b in zip(runs["NSA"], runs["dense"], strict=True)]
    parameters = ", ".join(f"{name} {column[0]['parameters']:,}" for name, column in runs.items())
    return (
        f"Bytes of Python's standard library; parameters: {parameters} (dense is wider); {model['num_layers']} layers, "
        f"B={training['batch_size']}, S={training['seq_len']}, fp32; {sizes(model['nsa'])}. "
        f"{len(gaps)} seeds (pale), their mean, moving mean of {2 * SMOOTH_OVER + 1} steps; "
        f"marks: {training['eval_sequences']} held-out sequences, on the right seed by seed. NSA - dense at the end: "
        f"{', '.join(f'{gap:+.3f}' for gap in gaps)}. {record.where()}."
    )


def _final(runs: Sequence[dict]) -> float:
    return fmean(run["held_out"][-1][1] for run in runs)


def _text(steps: int, seq_len: int) -> list[float]:
    return [step * seq_len / 1000 for step in range(1, steps + 1)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of the steps around each, fewer at both ends."""
    windows = (values[max(0, i - SMOOTH_OVER) : i + SMOOTH_OVER + 1] for i in range(len(values)))
    return [fmean(window) for window in windows]
