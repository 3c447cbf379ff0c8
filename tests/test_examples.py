"""Every file of ``examples/`` runs, at a small size; what they claim of their results, they assert themselves."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "layer": {"seq_len": 256},
    "train": {"steps": 5, "seq_len": 64, "batch_size": 2, "dim": 64, "num_layers": 1},
    "pack": {"lengths": (40, 1, 70)},
    "own_mod": {"seq_len": 320, "passage": 160},
    "decode": {"prompt_len": 100, "new_tokens": 4, "chunk": 40},
    "serve": {},
    "generate": {"prompt_len": 40, "new_tokens": 12, "batch_size": 2},
}


def run(name: str) -> Any:
    """Run ``main`` of an example at its small size."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**SMALL[name])


def test_each_has_a_small_size() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == SMALL.keys()


@pytest.mark.parametrize("name", [name for name in SMALL if name != "train"])
def test_runs(name: str) -> None:
    run(name)


def test_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    # All of the compiler but its last part: Inductor would spend half a minute in a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    losses = run("train")
    assert losses[-1] < losses[0]
