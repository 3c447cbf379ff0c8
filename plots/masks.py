"""What each branch lets a query see, and all three together: 64 tokens, from the functions that attention runs on."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.harness.palette import BLUE, GREEN, GREY, ORANGE
from flexnsa import NSAConfig
from flexnsa.attention.dispatch import REFERENCE
from flexnsa.attention.interface import Call
from flexnsa.config import num_compressed
from flexnsa.lm.diagnosis.environment import git_commit
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import Intervals
from flexnsa.masks.positions import Positions
from flexnsa.masks.window import window_intervals
from plots.records import Results
from plots.style import figure

LENGTH = 64
CONFIG = NSAConfig(
    compress_block_size=4,
    compress_stride=2,
    select_block_size=4,
    num_selected_blocks=4,
    num_init_blocks=1,
    num_local_blocks=1,
    window_size=8,
)
HIDDEN, FUTURE = "#ffffff", "#efefef"


def draw(results: Results) -> Figure:  # noqa: ARG001
    """Four panels of queries by keys; the compressed one has the compressed tokens for keys."""
    positions = Positions.of_sequence(LENGTH)
    compressed = _visible(compressed_intervals(positions, CONFIG), num_compressed(LENGTH, CONFIG))
    window = _visible(window_intervals(positions, CONFIG), LENGTH)
    selected = _selected(positions)
    summarised = _summarised(compressed)

    share = (selected | window).sum() / (LENGTH * (LENGTH + 1) / 2)
    caption = (
        f"{LENGTH} tokens; l={CONFIG.compress_block_size}, d={CONFIG.compress_stride}, l'={CONFIG.select_block_size}, "
        f"n={CONFIG.num_selected_blocks} (first and own block always among them), w={CONFIG.window_size}; one head, "
        f"random queries and keys. Together: colour is where a token is read itself, {share:.0%} of all causal pairs, "
        f"brown where both branches read it; dots are where a compressed token alone stands for it. Grey: the future. "
        f"Drawn from the masks and the selection of the package, commit {git_commit()}."
    )
    result, axes = figure("Three views of the past, and their union", caption, size=(12.4, 4.4), columns=4)
    _panel(axes[0], compressed.int(), [HIDDEN, BLUE], f"compressed: {compressed.shape[1]} keys")
    _panel(axes[1], selected.int(), [HIDDEN, ORANGE], f"selected: {CONFIG.num_selected_blocks} blocks a query")
    _panel(axes[2], window.int(), [HIDDEN, GREEN], f"window: the last {CONFIG.window_size}")
    both = selected.int() + 2 * window.int()
    _panel(axes[3], both, [HIDDEN, ORANGE, GREEN, "#8a7a2b"], "together")
    y, x = torch.nonzero(summarised & (both == 0), as_tuple=True)
    axes[3].scatter(x, y, s=1.6, color=BLUE, linewidths=0)
    axes[0].set_ylabel("query")
    for ax in axes[1:]:
        ax.set_xlabel("key token")
    axes[0].set_xlabel("compressed token")
    for ax, width in zip(axes, (compressed.shape[1], LENGTH, LENGTH, LENGTH), strict=True):
        _shade_future(ax, width)
    return result


def _visible(intervals: Intervals, num_keys: int) -> Tensor:
    key = torch.arange(num_keys)
    return (intervals.lo[0, :, None] <= key) & (key < intervals.hi[0, :, None])


def _selected(positions: Positions) -> Tensor:
    torch.manual_seed(4)
    q, k_cmp = torch.randn(1, 1, LENGTH, 16), torch.randn(1, 1, num_compressed(LENGTH, CONFIG), 16)
    q[:, :, 1:] += 2 * q[:, :, :-1].clone() + q[:, :, :1]  # neighbours ask for similar things, as in text
    blocks = REFERENCE.select(q, k_cmp, Call(CONFIG, 1.0, positions=positions), None, None)[0, 0]
    key = torch.arange(LENGTH)
    return (key // CONFIG.select_block_size == blocks[..., None]).any(1) & (key <= positions.token[0, :, None])


def _summarised(compressed: Tensor) -> Tensor:
    """Tokens that a visible compressed token is made of."""
    summarised = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for index in range(compressed.shape[1]):
        first = index * CONFIG.compress_stride
        summarised[:, first : first + CONFIG.compress_block_size] |= compressed[:, index, None]
    return summarised


def _panel(ax: Axes, shown: Tensor, colours: list[str], title: str) -> None:
    values = np.asarray(shown)
    ax.imshow(
        values,
        cmap=ListedColormap(colours),
        vmin=0,
        vmax=len(colours) - 1,
        aspect=values.shape[1] / LENGTH,
        interpolation="none",
        extent=(-0.5, values.shape[1] - 0.5, LENGTH - 0.5, -0.5),
    )
    ax.set_title(title, fontsize=10)
    ax.grid(False)
    ax.set_yticks(range(0, LENGTH, 16))
    ax.set_xticks(range(0, values.shape[1], 16 if values.shape[1] == LENGTH else 8))
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
    ax.tick_params(length=2, colors=GREY)


def _shade_future(ax: Axes, width: int) -> None:
    """Keys after the query's own; a compressed token is of the future until its last token is past."""
    query = np.arange(LENGTH + 1) - 0.5
    if width == LENGTH:
        first = query + 1
    else:
        seen = [num_compressed(t + 1, CONFIG) for t in range(LENGTH)]
        first = np.array([*seen, seen[-1]]) - 0.5
    ax.fill_betweenx(query, first, width - 0.5, step="post", color=FUTURE, linewidth=0, zorder=1.5)
    ax.set(xlim=(-0.5, width - 0.5), ylim=(LENGTH - 0.5, -0.5))
