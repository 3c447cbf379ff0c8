"""An implementation that cannot train on the device is named in one line, before there is a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import SIZES, write_text

from flexnsa.lm.cli import main

COMMANDS = {
    "train": "train",
    "gradients": "diagnose gradients",
    "bisect": "diagnose bisect",
    "matrix": "diagnose matrix",
    "soak": "diagnose soak",
}
MODEL = [*SIZES.split()[:10], "--seq-len", "24", "--device", "cpu"]


@pytest.mark.parametrize("impl", ["triton", "flex"])
@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_named_before_the_run(name: str, impl: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    text, out = write_text(tmp_path / "text"), tmp_path / "out"
    said = refused(main, [*COMMANDS[name].split(), "--text", str(text), "--out", str(out), *MODEL, "--impl", impl])
    assert "argument --impl: expected 'auto' or 'sdpa' to train on a CPU" in said
    assert f"got '{impl}'" in said
    assert not out.exists()
