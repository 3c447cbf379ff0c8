"""Bytes of keys and values read for one decoded token against the context, from the closed form of the package."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flexnsa.cli.recording import git_commit
from flexnsa.memory import estimate_decoding
from flexnsa.models import preset
from plots.records import Results
from plots.style import BLUE, ORANGE, Label, figure, label_curves, length_axes

LENGTHS = [2**power for power in range(10, 18)]


def draw(results: Results) -> Figure:  # noqa: ARG001
    """NSA and dense attention, per layer of the ``large`` preset, and their ratio at the longest context."""
    model = preset("large", num_layers=1)
    tokens = [estimate_decoding(model, seq_len=length) for length in LENGTHS]
    read = [token.bytes_read / 2**20 for token in tokens]
    dense = [token.dense_bytes_read / 2**20 for token in tokens]
    nsa = model.nsa
    caption = (
        f"One layer, {model.num_kv_heads} key heads of {model.head_dim}, bf16, B=1; l={nsa.compress_block_size}, "
        f"d={nsa.compress_stride}, l'={nsa.select_block_size}, n={nsa.num_selected_blocks}, w={nsa.window_size}. "
        f"Closed form of flexnsa.memory, not a measurement; commit {git_commit()}."
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
