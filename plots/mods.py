"""What mods do to attention: the probabilities of 64 tokens, from a window branch that is wide open."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.harness.palette import BLUE, GREY
from flexnsa import NSAConfig, mods, sliding_window_attention
from flexnsa.lm.diagnosis.environment import git_commit
from plots.records import Results
from plots.style import figure

LENGTH = 64
CONFIG = NSAConfig(window_size=LENGTH)
DOCUMENTS = torch.repeat_interleave(torch.arange(3), torch.tensor([29, 8, 27]))[None]
COLOURS = LinearSegmentedColormap.from_list("probability", ["#ffffff", "#b9d8ea", BLUE, "#00233b"])


def draw(results: Results) -> Figure:  # noqa: ARG001
    """Eight panels of queries by keys, each row relative to its largest probability."""
    wave = torch.cos(torch.arange(LENGTH) / 2.5)[None] * 0.7  # a bias by distance such as a model could learn
    panels: list[tuple[str, dict[str, Any]]] = [
        ("no mod", {}),
        ("soft_cap(1)", {"score_mod": mods.soft_cap(1.0)}),
        ("alibi(slopes)", {"score_mod": mods.alibi(torch.tensor([0.15]))}),
        ("distance_bias(bias)", {"score_mod": mods.distance_bias(3 * wave)}),
        ("prefix_lm(8, window=12)", {"mask_mod": mods.prefix_lm(8, 12)}),
        ("banned_span(20, 32)", {"mask_mod": mods.banned_span(20, 32)}),
        ("document_ids", {"document_ids": DOCUMENTS}),
        (
            "packed, alibi, prefix_lm(3, 6)",
            {
                "document_ids": DOCUMENTS,
                "score_mod": mods.alibi(torch.tensor([0.15])),
                "mask_mod": mods.prefix_lm(3, 6),
            },
        ),
    ]
    caption = (
        f"{LENGTH} tokens, one head, the same random queries and keys in all panels; colour is attention relative to "
        f"the largest of its row, from the window branch with a window of {LENGTH}. The compressed and the selected "
        f"branch, and the scoring of blocks, apply the same mod to the same token positions. Reference "
        f"implementation, fp64, commit {git_commit()}."
    )
    result, axes = figure("Mods of your own", caption, size=(11.4, 6.6), columns=4, rows=2)
    for ax, (title, options) in zip(axes.flat, panels, strict=True):
        _panel(ax, _probabilities(**options), title)
    for ax in axes[:, 0]:
        ax.set_ylabel("query")
    for ax in axes[1]:
        ax.set_xlabel("key")
    return result


def _probabilities(**options: Any) -> Tensor:
    """Attend to values that are the rows of the identity: what comes back are the probabilities."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, LENGTH, 16, generator=generator, dtype=torch.float64).unbind()
    v = torch.eye(LENGTH, dtype=torch.float64)[None, None]
    out, _ = sliding_window_attention(q, k, v, config=CONFIG, scale=0.4, impl="reference", **options)
    return out[0, 0]


def _panel(ax: Axes, probabilities: Tensor, title: str) -> None:
    relative = probabilities / probabilities.amax(1, keepdim=True).clamp_min(1e-12)
    ax.imshow(np.asarray(relative.sqrt()), cmap=COLOURS, vmin=0, vmax=1, interpolation="none")
    ax.set_title(title, fontsize=9)
    ax.grid(False)
    ax.set_xticks(range(0, LENGTH, 16))
    ax.set_yticks(range(0, LENGTH, 16))
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
    ax.tick_params(length=2, colors=GREY)
