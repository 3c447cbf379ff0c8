"""Figures of text compare each model with the dense one of the same positions and seeds, and say by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from plots import language
from plots.records import NotRecordedError, Results

BEST = "NSA, rope 1e8, shared keys, begun as mean"
BITS = {"dense": 1.0, "dense, rope 1e8": 0.9, "NSA": 1.1, BEST: 0.93}


def run(model: str, seed: int, bits: float, *, other_blocks: bool) -> dict[str, Any]:
    """A run whose every position has the same bits, and half a bit more with random blocks."""
    costs = {"own": 0.0, "random": 0.5, "forced": 1.0} if other_blocks else {}
    finals: dict[str, Any] = {
        f"bits with {name} blocks": {"mean": bits + cost, "positions": [bits + cost] * 14}
        for name, cost in costs.items()
    }
    finals["bits"] = {"mean": bits, "num_rows": 1, "positions": [bits] * 14}
    held_out, gates = [[0, 0.0, 8.0], [9, 5.0, bits]], [[0, [[0.5] * 3]], [9, [[0.1, 0.2, 0.3]]]]
    about = {"size": "m7c-125m", "model": model, "seed": seed, "steps": 9, "parameters": 10}
    return about | {"finals": finals, "held_out": held_out, "gates": gates}


def recorded(folder: Path, points: list[dict[str, Any]]) -> Results:
    sizes = {"num_selected_blocks": 16, "select_block_size": 64, "window_size": 512}
    sizes |= {"compress_block_size": 32, "compress_stride": 16}
    model = {"num_layers": 1, "dim": 8, "num_heads": 2, "num_kv_heads": 1, "nsa": sizes}
    training = {"batch_size": 1, "seq_len": 8192, "precision": "bf16", "eval_sequences": 4}
    environment = {"device": "a GPU", "threads": 1, "torch": "2", "commit": "0"}
    setting = {"device": "cuda", "sizes": {"m7c-125m": {"model": model, "training": training}}}
    content = {"environment": environment, "setting": setting, "text": {"bytes": {"train": 1e6}}, "points": points}
    (folder / "language_h200.json").write_text(json.dumps(content))
    return Results(folder)


def headline(figure: Figure) -> str:
    return next(text.get_text() for text in figure.texts if text.get_fontweight() == "bold")


def test_models_are_compared_with_the_dense_one_of_their_positions_and_seeds(tmp_path: Path) -> None:
    points = [run(model, 0, bits, other_blocks="NSA" in model) for model, bits in BITS.items()]
    points += [run("dense, rope 1e8", 1, 7.0, other_blocks=False)]  # of a seed that its twin has not
    results = recorded(tmp_path, points)
    assert headline(language.losses(results)).endswith("NSA - dense: NSA +0.100; NSA, rope 1e8, shared keys +0.030")
    figure = language.positions(results)
    assert headline(figure).startswith("NSA, rope 1e8, shared keys: random blocks")
    assert "+0.500" in headline(figure)
    drawn = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    lines = {line.get_color(): set(np.round(np.asarray(line.get_ydata()), 9)) for line in drawn}
    gaps = {name: lines[language.COLOURS[name]] for name in ("NSA", BEST)}
    assert gaps == {"NSA": {0.1}, BEST: {0.03}}
    assert [lines[colour] for _, colour in language.BLOCKS.values()] == [{0.5}, {1.0}]


def test_what_was_not_read_with_other_blocks_is_not_drawn_with_them(tmp_path: Path) -> None:
    points = [run(model, 0, bits, other_blocks=model == "NSA") for model, bits in BITS.items()]
    assert headline(language.positions(recorded(tmp_path, points))).startswith("NSA: random blocks")
    points = [run(model, 0, bits, other_blocks=False) for model, bits in BITS.items()]
    with pytest.raises(NotRecordedError, match="read with other blocks"):
        language.positions(recorded(tmp_path, points))
