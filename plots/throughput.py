"""Training: tokens a second of decoders with NSA and of their dense baselines against the length of a row."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.harness.palette import BLUE, ORANGE
from plots.records import NotRecordedError, Results
from plots.style import figure, length_axes

NAMES = {"nsa": ("NSA", BLUE), "dense": ("dense, cuDNN", ORANGE)}
SETTINGS = {"default settings": "training_text_h200.json", "the paper's settings": "training_h200.json"}
"""Each with its measurements."""
Curves = dict[str, dict[int, float]]


def on_gpu(results: Results) -> Figure:
    """Whole steps: forward, loss, backward and optimizer."""
    records = {settings: results.load(name) for settings, name in SETTINGS.items()}
    models: dict[str, Curves] = {}
    for settings, record in records.items():
        for point in record.points():
            if "tokens_per_s" in point:
                title = f"{point['model']}, {settings}"
                curves = models.setdefault(title, {name: {} for name in NAMES})
                curves[point["attention"]][point["seq_len"]] = point["tokens_per_s"]
    models = {name: curves for name, curves in models.items() if _ratios(curves)}
    if not models:
        raise NotRecordedError("The measurements hold no training of both NSA and dense attention.")
    caption = (
        "Medians of whole training steps of 65,536 tokens, bf16 under autocast, layers compiled, nothing checkpointed; "
        f"above the lengths, how many times the tokens of its dense twin a model with NSA trains on. "
        f"{'; '.join(f'{settings}: {record.where()}' for settings, record in records.items())}."
    )
    result, axes = figure(_headline(models), caption, size=(15, 4.6), columns=len(models))
    for ax, (name, curves) in zip([axes] if len(models) == 1 else axes, models.items(), strict=True):
        _panel(ax, curves)
        ax.set_title(name)
    return result


def _ratios(curves: Curves) -> dict[int, float]:
    """By length, how many times the tokens of its dense twin a model with NSA trains on."""
    both = sorted(curves["nsa"].keys() & curves["dense"].keys())
    return {length: curves["nsa"][length] / curves["dense"][length] for length in both}


def _headline(models: dict[str, Curves]) -> str:
    longest = [max(_ratios(curves).items())[1] for curves in models.values()]
    times = f"{min(longest):.1f} to {max(longest):.1f} times"
    return f"At the greatest length NSA trains {times} as fast as dense attention"


def _panel(ax: Axes, curves: Curves) -> None:
    ratios = _ratios(curves)
    length_axes(ax, list(ratios), room=1.25)
    ax.set_yscale("linear")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1000:g}k"))
    ax.set_ylabel("tokens a second")
    for name, (label, colour) in NAMES.items():
        points = sorted(curves[name].items())
        ax.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=2.2, label=label)
    ax.set_ylim(0, 1.18 * max(max(curve.values()) for curve in curves.values()))
    for length, ratio in ratios.items():
        top = max(curve[length] for curve in curves.values())
        ax.annotate(f"{ratio:.2f}x", (length, top), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    ax.legend(loc="lower left", frameon=False)
