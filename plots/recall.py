"""Recall of keys and values scattered over a row: by the row's length, and by how deep in it they stand."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from flexnsa.measure.palette import BLUE, GREEN, GREY, ORANGE, SKY
from plots.records import NotRecordedError, Record, Results
from plots.style import Label, figure, label_curves, short

LINES = {
    "NSA": (BLUE, "o"),
    "dense": (ORANGE, "s"),
    "window only": (GREY, "v"),
    "NSA without selected": (SKY, "^"),
    "NSA without compressed": (GREEN, "D"),
}
"""Models in the order of panels; others are in the record alone."""
TITLES = {"pairs": "all of many pairs", "needle": "a pair alone in filler"}
SHARE = LinearSegmentedColormap.from_list("share", ["#ffffff", "#bcd4e6", BLUE, "#00263f"])
Maps = dict[tuple[str, str, int], list[float]]
"""By model, kind and length: shares by depth, means over seeds."""


def by_length(results: Results) -> Figure:
    """A panel of each kind of row, a curve of each model."""
    record = results.load("recall_h200.json")
    maps = _maps(record)
    trained = _trained_on(record)
    longest = max((s for name, _, s in maps if name == "NSA"), default=0)
    result, axes = figure(_headline(maps, trained), _caption(record), size=(11, 4.9), columns=2)
    for ax, kind in zip(axes, TITLES, strict=True):
        _curves(ax, {(name, s): fmean(shares) for (name, k, s), shares in maps.items() if k == kind}, longest)
        ax.axvspan(trained, longest * 24, color=GREY, alpha=0.08, linewidth=0)
        ax.text(trained * 1.1, 1.055, "longer than trained on", color=GREY, fontsize=8.5, va="center")
        ax.set_title(TITLES[kind], fontsize=10.5)
    axes[0].set_ylabel("values recalled, mean over depths")
    return result


def by_depth(results: Results) -> Figure:
    """A map of depth and length for each model and kind of row."""
    record = results.load("recall_h200.json")
    maps = _maps(record)
    names, lengths = [name for name in LINES if any(key[0] == name for key in maps)], sorted({s for _, _, s in maps})
    title = f"Recall by depth in the row, after training on rows of up to {short(_trained_on(record))} tokens"
    result, axes = figure(title, _caption(record), size=(2.3 * len(names) + 0.9, 5.6), columns=len(names), rows=2)
    result.subplots_adjust(wspace=0.1, hspace=0.2)
    for column, name in enumerate(names):
        for row, kind in enumerate(TITLES):
            _heat(axes[row, column], np.array([maps.get((name, kind, s), [np.nan] * 16) for s in lengths]).T)
            axes[row, column].set_xticks(range(len(lengths)), [short(s) for s in lengths] if row else [])
            axes[row, column].tick_params(labelleft=column == 0, labelsize=8)
        axes[0, column].set_title(name, fontsize=10)
    for row, kind in enumerate(TITLES):
        axes[row, 0].set_ylabel(f"{TITLES[kind]}\ndepth", fontsize=9)
    axes[1, len(names) // 2].set_xlabel("sequence length S, tokens")
    bar = result.add_axes((0.84, 0.955, 0.14, 0.018))
    result.colorbar(ScalarMappable(Normalize(0, 1), SHARE), cax=bar, orientation="horizontal", ticks=[0, 0.5, 1])
    bar.tick_params(labelsize=8, length=2)
    return result


def _curves(ax: Axes, means: dict[tuple[str, int], float], longest: int) -> None:
    labels = []
    for name, (colour, marker) in LINES.items():
        points = sorted((s, share) for (model, s), share in means.items() if model == name)
        if not points:
            continue
        x, y = zip(*points, strict=True)
        width = 2.6 if name == "NSA" else 1.6
        ax.plot(x, y, color=colour, marker=marker, markersize=5.5, linewidth=width)
        labels.append(Label(x[-1], y[-1], name, colour))
    lengths = sorted({s for _, s in means})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [short(s) for s in lengths])
    ax.set_xlim(lengths[0] * 0.85, longest * 24)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    ax.set_ylim(-0.08, 1.1)
    ax.set_xlabel("sequence length S, tokens")
    label_curves(ax, labels)


def _heat(ax: Axes, shares: np.ndarray) -> None:
    ax.imshow(shares, aspect="auto", interpolation="nearest", cmap=SHARE, vmin=0, vmax=1)
    ax.set_yticks([0, len(shares) - 1], ["first", "last"])
    ax.grid(visible=False)


def _maps(record: Record) -> Maps:
    found: dict[tuple[str, str, int], list[list[float]]] = {}
    for point in record.content["points"]:
        last = max((entry["step"] for entry in point.get("maps", [])), default=0)
        for entry in point.get("maps", []):
            if entry["step"] == last:
                found.setdefault((point["variant"], entry["kind"], entry["seq_len"]), []).append(entry["recall"])
    if not found:
        raise NotRecordedError("recall_h200.json has no maps; python -m benchmarks learning.recall draws them.")
    return {key: [fmean(depth) for depth in zip(*seeds, strict=True)] for key, seeds in found.items()}


def _trained_on(record: Record) -> int:
    return max(stage["seq_len"] for stage in record.content["plan"]["stages"])


def _headline(maps: Maps, trained: int) -> str:
    shares = [f"{name} {fmean(maps[name, 'pairs', trained]):.1%}" for name in LINES if (name, "pairs", trained) in maps]
    return f"Recalled of many pairs in {short(trained)} tokens: {', '.join(shares[:3])}"


def _caption(record: Record) -> str:
    model: dict[str, Any] = record.content["setting"]["models"]["NSA"]
    plan, nsa = record.content["plan"], model["nsa"]
    seeds = len({point["seed"] for point in record.content["points"]})
    steps = sum(stage["steps"] for stage in plan["stages"])
    selected = nsa["num_selected_blocks"] * nsa["select_block_size"]
    return (
        f"A value is asked for by its key at the end of a row; {plan['map_rows']} rows of a length, 16 depths, "
        f"among {plan['map_pairs']} other pairs at most, or for one in filler. Models of {model['num_layers']} layers, "
        f"dim={model['dim']}, {model['num_heads']} query and {model['num_kv_heads']} key heads of {model['head_dim']}, "
        f"trained for {steps} steps on rows of {plan['stages'][0]['seq_len']} to {_trained_on(record)} tokens. "
        f"l={nsa['compress_block_size']}, d={nsa['compress_stride']}, l'={nsa['select_block_size']}, "
        f"n={nsa['num_selected_blocks']} ({selected} tokens), w={nsa['window_size']}; bf16. "
        f"{seeds} seed{'s' * (seeds != 1)}. {record.where()}."
    )
