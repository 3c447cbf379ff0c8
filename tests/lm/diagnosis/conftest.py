"""A command of ``diagnose`` on a model so small that a step takes no time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flexnsa.lm.cli import main
from tests.lm.cli.tiny_run import write_text

SIZES = "--dim 16 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 8 --batch-size 2 --seq-len 24 --device cpu"


class Ran(NamedTuple):
    """How a command has ended: its status, what it printed, and what it wrote to ``--json``."""

    status: object
    out: str
    err: str
    record: dict[str, Any]


Diagnose = Callable[..., Ran]


@pytest.fixture
def diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Diagnose:
    """Return a function that runs ``diagnose WHAT`` with some options, and more that are not split at spaces."""

    def call(what: str, options: str = "", *more: str) -> Ran:
        text, out, file = tmp_path / "text", tmp_path / "out", tmp_path / "report.json"
        if not text.exists():
            write_text(text)
        file.unlink(missing_ok=True)
        command = f"diagnose {what} --text {text} --out {out} --json {file} {SIZES} {options}"
        status: object = 0
        try:
            main([*command.split(), *more])
        except SystemExit as left:
            status = left.code
        printed = capsys.readouterr()
        return Ran(status, printed.out, printed.err, json.loads(file.read_text()) if file.exists() else {})

    return call
