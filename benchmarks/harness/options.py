"""The options that all benchmarks share, under one name each: ``--json``, ``--device``, ``--seconds``, ``--commit``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

RESULTS = Path("benchmarks/results")


def parser(
    doc: str | None, *, json: Path | None = None, device: bool = True, seconds: float | None = None
) -> argparse.ArgumentParser:
    """Make the parser of a benchmark.

    Args:
        doc: of its module, shown as it stands.
        json: where it records by default; None: nowhere, unless it is told to.
        device: whether it runs on more than one.
        seconds: after which it stops measuring by default; None: it has no limit.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, default=json, help=f"record in this file; default: {json or 'none'}")
    made.add_argument("--commit", help="state of the code to record, where there is no git checkout")
    if device:
        made.add_argument("--device", type=device_type, default="auto", help="cpu, cuda; default: CUDA if there is one")
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="time limit; default: %(default)s")
    return made


def device_type(name: str) -> str:
    """Read a ``--device``: ``auto`` is CUDA where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected auto, cpu or cuda, got {name!r}")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("expected a device of this machine, got 'cuda', but there is no CUDA here")
    return name


def positive_int(text: str) -> int:
    """Read a number of which there has to be one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)


def about(doc: str | None) -> str:
    """What a recording says of how it was made: the module's docstring on one line."""
    return " ".join((doc or "").split())
