"""What a trained model does with one sequence that it never saw: the blocks its queries choose, and its gates."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from benchmarks.learning.trained import QUERIES, read_blocks
from flexnsa.lm.measure.palette import BLUE, GREEN, GREY, ORANGE
from plots.records import NotRecordedError, Record, Results
from plots.style import figure

COLOURS = {"cmp": BLUE, "slc": ORANGE, "win": GREEN}
MARKERS = {"cmp": "o", "slc": "s", "win": "^"}
FUTURE, READ = "#f1f1f1", "#c4c4c4"
SHARE = LinearSegmentedColormap.from_list("share", ["#ffffff", "#f6c49d", ORANGE, "#5c2800"])
Grid = NDArray[np.float64]


def draw(results: Results) -> Figure:
    """A panel of queries by blocks for each layer and key head, and one of gates."""
    record = results.load("trained.json")
    if "trained" not in record.content:
        raise NotRecordedError("trained.json has no trained model; python -m benchmarks learning.trained records it.")
    trained, sizes = record.content["trained"], record.content["setting"]["models"]["NSA"]["nsa"]
    heads = [(layer, head) for layer, words in enumerate(trained["blocks"]) for head in range(len(words))]
    chosen = [_chosen(trained["blocks"][layer][head]) for layer, head in heads]
    free = _free(chosen[0], sizes)
    reach = f"{_reach(chosen, free, sizes):.0%} of its choices lie in the earlier half"
    title = f"Where it may choose, a trained model reaches back: {reach}"
    widths = [1.0] * len(heads) + [0.55, 1.5]
    result, axes = figure(title, _caption(record), size=(13, 5.2), columns=len(widths), left=0.75, widths=widths)
    result.subplots_adjust(top=0.8, wspace=0.14)
    for ax, (layer, head), share in zip(axes, heads, chosen, strict=False):
        _panel(ax, share, free, sizes)
        ax.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=10)
        ax.tick_params(labelleft=ax is axes[0])
    axes[0].set_ylabel("query token")
    axes[len(heads) // 2].set_xlabel(f"block of {sizes['select_block_size']} tokens", x=0)
    axes[-2].set_axis_off()
    _gates(axes[-1], trained["gates"])
    _legend(result)
    return result


def _chosen(words: str) -> Grid:
    """Return the share of neighbouring queries that read a block, ``(queries / QUERIES, blocks)``."""
    counts = read_blocks(words)
    return np.array([row + [0] * (len(counts[-1]) - len(row)) for row in counts]) / QUERIES


def _free(chosen: Grid, sizes: dict[str, int]) -> NDArray[np.bool_]:
    """Return where queries have a choice: not of blocks that are always read, nor before there are more than ``n``."""
    own, block = _own(chosen, sizes), np.arange(chosen.shape[1])
    between = (block >= sizes["num_init_blocks"]) & (block <= own - sizes["num_local_blocks"])
    return between & (own >= sizes["num_selected_blocks"])


def _own(chosen: Grid, sizes: dict[str, int]) -> NDArray[np.int64]:
    return QUERIES * np.arange(len(chosen))[:, None] // sizes["select_block_size"]


def _reach(chosen: list[Grid], free: NDArray[np.bool_], sizes: dict[str, int]) -> float:
    """Share of free choices in the earlier half of what there was to choose from."""
    candidates = free.sum(1, keepdims=True)
    place = (np.arange(free.shape[1]) - sizes["num_init_blocks"] + 0.5) / np.maximum(candidates, 1)
    early = np.where(place < 0.5, 1.0, np.where(place == 0.5, 0.5, 0.0))
    return sum((share * free * early).sum() for share in chosen) / sum((share * free).sum() for share in chosen)


def _panel(ax: Axes, chosen: Grid, free: NDArray[np.bool_], sizes: dict[str, int]) -> None:
    colours, (rows, blocks) = SHARE(chosen), chosen.shape
    past = np.arange(blocks) <= _own(chosen, sizes)
    for where, colour in ((past & ~free, READ), (~past, FUTURE)):
        colours[where] = to_rgba(colour)
    ax.imshow(colours, aspect="auto", interpolation="nearest", extent=(0, blocks, QUERIES * rows, 0))
    ax.set_yticks(range(0, QUERIES * rows + 1, QUERIES * rows // 4))
    ax.set_xticks(range(0, blocks + 1, blocks // 2))
    ax.grid(False)


def _gates(ax: Axes, layers: list[list[dict[str, float]]]) -> None:
    """Mean gate of every head, a line of each branch in each layer; the branch's mean over heads as a stroke."""
    ticks = []
    for layer, heads in enumerate(layers):
        for line, (tag, colour) in enumerate(COLOURS.items()):
            y, values = 4 * layer + line, [head[tag] for head in heads]
            ax.scatter(values, [y] * len(values), color=colour, marker=MARKERS[tag], s=22, alpha=0.75, linewidths=0)
            mean = sum(values) / len(values)
            ax.plot([mean, mean], [y - 0.42, y + 0.42], color=colour, linewidth=2)
            ticks.append((y, tag, colour))
        ax.text(1.02, 4 * layer + 1, f"layer {layer + 1}", rotation=-90, va="center", fontsize=9, color=GREY)
    ax.set_yticks([y for y, _, _ in ticks], [tag for _, tag, _ in ticks], fontsize=8.5)
    for label, (_, _, colour) in zip(ax.get_yticklabels(), ticks, strict=True):
        label.set_color(colour)
    ax.set(xlim=(0, 1), ylim=(4 * len(layers) - 1.3, -0.7), xlabel="mean gate")
    ax.set_title("gates of all heads", fontsize=10)
    ax.grid(visible=False, axis="y")


def _legend(result: Figure) -> None:
    patches = [Patch(color=READ, label="always read, or no choice yet"), Patch(color=FUTURE, label="future")]
    result.legend(handles=patches, ncols=2, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.935), fontsize=9)
    bar = result.add_axes((0.53, 0.896, 0.16, 0.022))
    result.colorbar(ScalarMappable(Normalize(0, 1), SHARE), cax=bar, orientation="horizontal", ticks=[0, 0.5, 1])
    bar.tick_params(labelsize=8, length=2)
    result.text(0.52, 0.907, f"chosen, share of {QUERIES} queries", ha="right", va="center", fontsize=9)


def _caption(record: Record) -> str:
    model, trained = record.content["setting"]["models"]["NSA"], record.content["trained"]
    training, nsa = record.content["training"], model["nsa"]
    return (
        f"{training['seq_len']} bytes of Python that were not trained on, read after {training['steps']} sequences of "
        f"that length (seed {trained['seed']}). A query reads n={nsa['num_selected_blocks']} blocks: the first, the "
        f"last {nsa['num_local_blocks']}, and those it chooses. "
        "Diagonals follow the query at a distance, columns are blocks that many queries return to. "
        f"dim={model['dim']}, {model['num_heads']} query and {model['num_kv_heads']} key heads of {model['head_dim']}, "
        f"fp32; l={nsa['compress_block_size']}, d={nsa['compress_stride']}, l'={nsa['select_block_size']}, "
        f"w={nsa['window_size']}. Gates: mean over the "
        f"sequence of each query head, strokes: of all heads. {record.where()}."
    )
