"""Bits per byte of text: of NSA and of dense attention, by step and by position, and with other blocks selected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from benchmarks.learning.language_run import POSITIONS, Finals
from plots.records import NotRecordedError, Record, Results
from plots.style import Label, figure, label_curves, short, sizes

Point = dict[str, Any]
SIZE = "m7c-125m"
DENSE = "dense"
FAR = "rope 1e8"
RECIPE = f"NSA, {FAR}, shared keys, begun as mean, indexer, residual"
"""The model of the preset text-125m."""
COLOURS = {
    DENSE: AMBER,
    f"{DENSE}, {FAR}": ORANGE,
    "NSA": SKY,
    f"NSA, {FAR}": GREEN,
    f"NSA, {FAR}, shared keys, begun as mean": BLUE,
    RECIPE: "black",
}
"""Of the models that are drawn; what layers choose and how far gates open, of the last that was read so."""
MARKERS = dict(zip(COLOURS, "sDoP^v", strict=True))
BLOCKS = {"random": ("random blocks\n- own", PURPLE), "forced": ("forced blocks alone\n- own", GREY)}
"""What layers read in place of the blocks that they select, how it is called and its colour."""
BRANCHES = (("compressed", GREEN), ("selected", BLUE), ("window", GREY))
HIGHEST_BITS = 1.45
SHORTER: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.35}
"""How runs of a shorter schedule are drawn."""


def losses(results: Results) -> Figure:
    """Left: held-out bits against bytes seen. Right: against seconds of training."""
    record = results.load("language_h200.json")
    runs, training = _runs(record), record.content["setting"]["sizes"][SIZE]["training"]
    but = f", for curves {training['eval_sequences']}, below {HIGHEST_BITS} bits"
    result, axes = figure(_headline(runs), _caption(record, but), size=(11, 4.8), columns=2)
    seen = training["batch_size"] * training["seq_len"] / 1e6
    shorter = _shorter_runs(record)
    for ax, x_of, title, x_label in (
        (axes[0], lambda look: look[0] * seen, "after equal text", "bytes seen, millions"),
        (axes[1], lambda look: look[1], "after equal time", "seconds of training, one H200 each"),
    ):
        _curves(ax, runs, shorter, x_of, title, x_label)
    if shorter:
        schedules = " and ".join(f"{steps:,}" for steps in sorted({run["steps"] for run in shorter}))
        axes[1].plot([], [], label=f"pale: schedules of {schedules} steps", color=GREY, **SHORTER)
        axes[1].legend(loc="upper right", frameon=False)
    axes[0].set_ylabel("bits per held-out byte")
    return result


def positions(results: Results) -> Figure:
    """Left: how far NSA is behind by position, and what other blocks cost. Right: the gates while it learns."""
    record = results.load("language_h200.json")
    runs, setting = _runs(record), record.content["setting"]["sizes"][SIZE]
    nsa_sizes, rows = setting["model"]["nsa"], setting["training"]["batch_size"]
    name, nsa = _last_that_chose(runs)
    but = f", for other blocks {Finals().rows_of_choices}, for gates {rows}"
    means = "Left: means over seeds; dense attention has the same seeds and the same rope_base"
    caption = f"{means}. Other blocks: {name}; gates: its seed {nsa[0]['seed']}. {_caption(record, but)}"
    result, (left, right) = figure(_cost(name, nsa), caption, size=(11, 5.2), columns=2)
    _gaps(left, runs, nsa, nsa_sizes["num_selected_blocks"] * nsa_sizes["select_block_size"])
    _gates(right, nsa[0])
    return result


def _curves(
    ax: Axes,
    runs: dict[str, list[Point]],
    shorter: list[Point],
    x_of: Callable[[Any], float],
    title: str,
    x_label: str,
) -> None:
    labels: list[Label] = []

    def draw(run: Point, **style: Any) -> None:
        looks = [look for look in run["held_out"] if look[2] <= HIGHEST_BITS]
        x, y = [x_of(look) for look in looks], [look[2] for look in looks]
        ax.plot(x, y, color=COLOURS[run["model"]], **style)

    for run in shorter:
        draw(run, **SHORTER)
    for name, seeds in runs.items():
        for run in seeds:
            draw(run, marker=MARKERS[name], markersize=3.5, linewidth=1.6)
        mean_end = fmean(run["held_out"][-1][2] for run in seeds)
        labels.append(Label(x_of(seeds[0]["held_out"][-1]), mean_end, _in_lines(name), COLOURS[name]))
    end = max(label.x for label in labels)
    ax.set(xlim=(0, end * 1.55), ylim=(ax.get_ylim()[0] - 0.14, None), title=title.capitalize(), xlabel=x_label)
    # All names stand at the right, also those of curves that end early.
    label_curves(ax, [Label(end, label.y, label.text, label.colour) for label in labels])


def _gaps(ax: Axes, runs: dict[str, list[Point]], own: list[Point], all_read: int) -> None:
    """Draw the differences to dense attention, and what a model loses with other blocks than its own."""
    read = len(_by_position(own, "bits with own blocks"))
    x = [(begin + end) / 2 for begin, end in pairwise(POSITIONS)][:read]
    labels: list[Label] = []

    def draw(label: str, colour: str, measured: list[float], base: list[float]) -> None:
        y = [a - b for a, b in zip(measured, base, strict=True)]
        ax.plot(x, y, color=colour, marker="o", markersize=4, linewidth=1.8)
        labels.append(Label(x[-1], y[-1], label, colour))

    ax.plot([x[0], x[-1]], [0, 0], color=ORANGE, linewidth=1)
    for blocks, (label, colour) in BLOCKS.items():
        draw(label, colour, _by_position(own, f"bits with {blocks} blocks"), _by_position(own, "bits with own blocks"))
    for name in runs:
        if pair := _pair(name, runs):
            draw(f"{_in_lines(name)} - dense", COLOURS[name], *map(_by_position, pair))
    ax.axvspan(x[0] / 1.2, all_read, color=GREY, alpha=0.08, linewidth=0)
    ax.text(all_read / 1.1, ax.get_ylim()[1], "all blocks\nare selected", color=GREY, ha="right", va="top")
    ax.set_xscale("log", base=2)
    ticks = [2**power for power in range(5, 14)]
    ax.set_xticks(ticks, [short(tick) for tick in ticks])
    ax.set_xlim(x[0] / 1.2, x[-1] * 18)
    ax.set(title="By position in the row", xlabel="bytes before", ylabel="bits per byte")
    label_curves(ax, labels)


def _gates(ax: Axes, nsa: Point) -> None:
    """Draw each layer pale, and their mean."""
    labels: list[Label] = []
    steps = [step for step, _ in nsa["gates"]]
    for branch, (name, colour) in enumerate(BRANCHES):
        layers = zip(*([gates[branch] for gates in layers] for _, layers in nsa["gates"]), strict=True)
        layers = [list(layer) for layer in layers]
        for layer in layers:
            ax.plot(steps, layer, color=colour, linewidth=0.8, alpha=0.35)
        mean = [fmean(column) for column in zip(*layers, strict=True)]
        ax.plot(steps, mean, color=colour, linewidth=2.4)
        labels.append(Label(steps[-1], mean[-1], name, colour))
    ax.set(xlim=(0, steps[-1] * 1.32), ylim=(0, None), title="Mean gates, a pale line for each layer", xlabel="steps")
    label_curves(ax, labels)


def _runs(record: Record) -> dict[str, list[Point]]:
    """Return the whole runs of the large model, by its name, of the longest schedule that NSA and its baseline have."""
    ended = _ended(record)
    schedules = [{run["steps"] for run in ended if run["model"] == name} for name in (DENSE, "NSA")]
    if not (both := set.intersection(*schedules)):
        raise NotRecordedError(f"language_h200.json has no schedule of {SIZE} that both {DENSE} and NSA ended.")
    steps = max(both)
    found = {name: [run for run in ended if run["model"] == name and run["steps"] == steps] for name in COLOURS}
    return {name: seeds for name, seeds in found.items() if seeds}


def _last_that_chose(runs: dict[str, list[Point]]) -> tuple[str, list[Point]]:
    """Return the last model that has read other blocks than those it selects, and its runs that have."""
    needed = [f"bits with {blocks} blocks" for blocks in ("own", *BLOCKS)]
    for name, seeds in reversed(runs.items()):
        if chose := [run for run in seeds if all("mean" in run["finals"].get(final, {}) for final in needed)]:
            return name, chose
    raise NotRecordedError(f"language_h200.json has no model of {SIZE} that was read with other blocks.")


def _shorter_runs(record: Record) -> list[Point]:
    steps = _runs(record)[DENSE][0]["steps"]
    return [run for run in _ended(record) if run["steps"] < steps]


def _ended(record: Record) -> list[Point]:
    points = [point for point in record.content["points"] if point["size"] == SIZE and point["model"] in COLOURS]
    return [point for point in points if "mean" in point.get("finals", {}).get("bits", {})]


def _by_position(seeds: list[Point], name: str = "bits") -> list[float]:
    return [fmean(column) for column in zip(*(run["finals"][name]["positions"] for run in seeds), strict=True)]


def _mean_bits(seeds: list[Point], name: str = "bits") -> float:
    return fmean(run["finals"][name]["mean"] for run in seeds)


def _headline(runs: dict[str, list[Point]]) -> str:
    gaps = [f"{_called(name)} {_gap(*pair):+.3f}" for name in runs if (pair := _pair(name, runs))]
    first_and_last = dict.fromkeys((*gaps[:1], *gaps[-1:]))
    return f"Bits per held-out byte, NSA - dense: {'; '.join(first_and_last)}"


def _pair(name: str, runs: dict[str, list[Point]]) -> list[list[Point]] | None:
    """Return the runs of a model of NSA and of its dense baseline, with the seeds that both have, if they have any."""
    if name.startswith(DENSE):
        return None
    seeds, dense = runs[name], runs.get(f"{DENSE}, {FAR}" if FAR in name else DENSE, [])
    both = {run["seed"] for run in seeds} & {run["seed"] for run in dense}
    return [[run for run in model if run["seed"] in both] for model in (seeds, dense)] if both else None


def _gap(nsa: list[Point], dense: list[Point]) -> float:
    return _mean_bits(nsa) - _mean_bits(dense)


def _cost(name: str, runs: list[Point]) -> str:
    cost = _mean_bits(runs, "bits with random blocks") - _mean_bits(runs, "bits with own blocks")
    return f"{_called(name)}: random blocks in place of those selected cost {cost:+.3f} bits per byte"


def _called(name: str) -> str:
    """Shorten what the caption says whole."""
    return "text-125m" if name == RECIPE else name.removesuffix(", begun as mean")


def _in_lines(name: str) -> str:
    return _called(name).replace(", shared", ",\nshared")


def _caption(record: Record, but: str) -> str:
    setting, text = record.content["setting"]["sizes"][SIZE], record.content["text"]["bytes"]
    model, training = setting["model"], setting["training"]
    runs = _runs(record)
    models = "; ".join(f"{name}: {seeds[0]['parameters'] / 1e6:.0f}M" for name, seeds in runs.items())
    seeds = "; ".join(f"{name}: {len(seeds)}" for name, seeds in runs.items())
    rows = runs[DENSE][0]["finals"]["bits"]["num_rows"]
    return (
        f"Python sources, {text['train'] / 1e6:.0f}M bytes; {rows} rows of packages that no model has "
        f"seen{but}. {model['num_layers']} layers of {model['dim']}, {model['num_heads']} query and "
        f"{model['num_kv_heads']} key heads. Parameters: {models}. {runs[DENSE][0]['steps']:,} steps of "
        f"B={training['batch_size']}, S={training['seq_len']:,}, {training['precision']}; "
        f"{sizes(model['nsa'])}. Seeds: {seeds}. {record.where()}."
    )
