"""Recall of keys and values scattered over a row: by the row's length, and by how deep in it they stand."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from benchmarks.harness.palette import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from benchmarks.learning.plan import DEPTHS
from plots.records import NotRecordedError, Record, Results
from plots.style import figure, short

BLACK = "#000000"
RECIPE = "NSA, shared keys, begun as mean, slow, indexer, residual"
LINES = {
    "dense": ("dense", ORANGE),
    RECIPE: ("NSA, default settings", GREEN),
    "NSA, slow, l=4 d=2": ("NSA, slow, l=4 d=2", SKY),
    "NSA, slow": ("NSA, slow compressors", BLUE),
    "NSA without selected": ("without selected", PURPLE),
    "NSA without compressed": ("without compressed", BLACK),
    "NSA": ("NSA, plain", AMBER),
    "window only": ("window only", GREY),
}
"""Models in the order of panels, how they are called there; others are in the record alone."""
NAMED = ("dense", RECIPE, "NSA, slow", "NSA")
"""Those drawn thick."""
LOOKS = {"recall": "values recalled of new rows", "unscored": "blocks that score exactly 0, last layer"}
TITLES = {"pairs": "one of many pairs", "needle": "a pair alone in filler"}
SHARE = LinearSegmentedColormap.from_list("share", ["#ffffff", "#bcd4e6", BLUE, "#00263f"])
Maps = dict[tuple[str, str, int], list[list[float]]]
"""By model, kind and length: of every seed, shares by depth."""


def by_step(results: Results) -> Figure:
    """What is recalled in the course of training, and how many blocks selection cannot tell apart."""
    record = results.load("recall_h200.json")
    stages = record.content["plan"]["stages"]
    model = record.content["setting"]["models"]["NSA"]
    reach = model["num_layers"] * model["nsa"]["window_size"]
    asked = f"At the top: S. Pairs at least {reach} tokens back, or half a row, in as many new rows as a step has."
    title = "While rows grow, plain NSA unlearns what it knew, and its blocks come to score 0"
    result, axes = figure(title, f"{asked} {_models(record)}", size=(11.6, 4.9), columns=2)
    for ax, (kind, name) in zip(axes, LOOKS.items(), strict=True):
        _looks(ax, record, kind)
        ax.set_title(name, pad=10)
        begin = 0
        for stage in stages:
            ax.axvline(begin, color=GREY, linewidth=0.6, alpha=0.5)
            ax.text(begin + 15, 1.04, short(stage["seq_len"]), color=GREY, fontsize=7, va="bottom")
            begin += stage["steps"]
        ax.set_xlim(0, begin)
        ax.set_xticks(range(0, begin + 1, 1000))
    result.subplots_adjust(right=0.81, wspace=0.2)
    axes[0].legend(loc="center left", bbox_to_anchor=(2.23, 0.5), frameon=False, fontsize=9)
    return result


def by_depth(results: Results) -> Figure:
    """A map of depth and length for each model and kind of row."""
    record = results.load("recall_h200.json")
    maps = _maps(record)
    names, lengths = [name for name in LINES if any(key[0] == name for key in maps)], sorted({s for _, _, s in maps})
    title = f"Recall by depth in the row, after training on rows of up to {short(_trained_on(record))} tokens"
    result, axes = figure(title, _caption(record), size=(1.75 * len(names) + 1.0, 5.6), columns=len(names), rows=2)
    result.subplots_adjust(wspace=0.1, hspace=0.2)
    for column, name in enumerate(names):
        for row, kind in enumerate(TITLES):
            shares = [np.mean(maps.get((name, kind, s), [[np.nan] * 16]), axis=0) for s in lengths]
            _heat(axes[row, column], np.array(shares).T)
            axes[row, column].set_xticks(range(len(lengths)), [short(s) for s in lengths] if row else [], fontsize=7)
            axes[row, column].tick_params(axis="y", labelleft=column == 0, labelsize=8)
        axes[1, column].set_xlabel("S, tokens", fontsize=8.5)
        axes[0, column].set_title(LINES[name][0].removeprefix("NSA, "), fontsize=9.5)
    for row, kind in enumerate(TITLES):
        axes[row, 0].set_ylabel(f"{TITLES[kind]}\ndepth", fontsize=9)
    bar = result.add_axes((0.86, 0.955, 0.12, 0.018))
    result.colorbar(ScalarMappable(Normalize(0, 1), SHARE), cax=bar, orientation="horizontal", ticks=[0, 0.5, 1])
    bar.tick_params(labelsize=8, length=2)
    return result


def _looks(ax: Axes, record: Record, kind: str) -> None:
    """Draw what was seen of a kind in the course of training, means over seeds."""
    for name, (label, colour) in LINES.items():
        looks: dict[int, list[float]] = {}
        for point in record.content["points"]:
            for (step, _), share in zip(record.content["looks"], point.get(kind, ()), strict=False):
                if point["variant"] == name:
                    looks.setdefault(step, []).append(share)
        if looks:
            y = [*map(fmean, looks.values())]
            ax.plot([*looks], y, color=colour, linewidth=2.2 if name in NAMED else 1.4, label=label)
    ax.set_xlabel("steps")
    _shares(ax)


def _shares(ax: Axes) -> None:
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    ax.set_ylim(-0.14, 1.1)


def _heat(ax: Axes, shares: np.ndarray) -> None:
    ax.imshow(shares, aspect="auto", interpolation="nearest", cmap=SHARE, vmin=0, vmax=1)
    ax.set_yticks([0, len(shares) - 1], ["first", "last"])
    ax.grid(visible=False)


def _maps(record: Record) -> Maps:
    found: Maps = {}
    for point in record.content["points"]:
        for kind, lengths in point.get("maps", {}).items():
            for seq_len, counts in lengths.items():
                questions = record.content["plan"]["map_rows"] // (1 if kind == "pairs" else DEPTHS)
                shares = [count / questions for count in counts]
                found.setdefault((point["variant"], kind, int(seq_len)), []).append(shares)
    if not found:
        raise NotRecordedError("recall_h200.json has no maps; python -m benchmarks learning.recall draws them.")
    return found


def _trained_on(record: Record) -> int:
    return max(stage["seq_len"] for stage in record.content["plan"]["stages"])


def _caption(record: Record) -> str:
    plan = record.content["plan"]
    return (
        f"A value is asked for by its key at the end of a row; {plan['map_rows']} rows of a length, 16 depths, "
        f"among {plan['map_pairs']} other pairs at most, or for one in filler. {_models(record)}"
    )


def _models(record: Record) -> str:
    model: dict[str, Any] = record.content["setting"]["models"]["NSA"]
    plan, nsa = record.content["plan"], model["nsa"]
    points = [point for point in record.content["points"] if point["variant"] in LINES and "maps" in point]
    seeds = Counter(point["variant"] for point in points).values()
    most = f"{max(seeds)} seed{'s' * (max(seeds) > 1)}"
    selected = nsa["num_selected_blocks"] * nsa["select_block_size"]
    return (
        f"Models of {model['num_layers']} layers, "
        f"dim={model['dim']}, {model['num_heads']} query and {model['num_kv_heads']} key heads of {model['head_dim']}, "
        f"trained on rows of {plan['stages'][0]['seq_len']} to {short(_trained_on(record))} tokens for "
        f"{sum(stage['steps'] for stage in plan['stages']):,} steps. "
        f"l={nsa['compress_block_size']}, d={nsa['compress_stride']}, l'={nsa['select_block_size']}, "
        f"n={nsa['num_selected_blocks']} ({selected} tokens), w={nsa['window_size']}; bf16. "
        f"Means of {most if min(seeds) == max(seeds) else f'{min(seeds)} to {most}'}. {record.where()}."
    )
