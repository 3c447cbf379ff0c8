"""The options that benchmarks share, under one name each, and the recording that they lead to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.recording import Recording

RESULTS = Path("benchmarks/results")


SHARED: dict[str, dict[str, Any]] = {
    "seconds": {"type": float, "help": "time limit; default: %(default)s"},
    "deadline": {"type": float, "help": "seconds after which to stop; default: %(default)s"},
    "lengths": {"type": int, "nargs": "+", "help": "tokens of a sequence; default: %(default)s"},
    "contexts": {"type": int, "nargs": "+", "help": "tokens in the cache; default: %(default)s"},
    "batches": {"type": int, "nargs": "+", "help": "sequences of a batch; default: %(default)s"},
    "rounds": {"type": int, "help": "in which all take turns; default: %(default)s"},
    "impl": {"help": "implementation of flexnsa on a GPU; default: %(default)s"},
    "tiny": {"action": "store_true", "help": "toy sizes: a rehearsal"},
}
"""Options that several benchmarks have, by name."""


def parser(
    doc: str | None, *, json: Path | None = None, device: bool = True, **defaults: Any
) -> argparse.ArgumentParser:
    """Make the parser of a benchmark.

    Args:
        doc: of its module, shown as it stands.
        json: where it records by default; None: nowhere, unless it is told to.
        device: whether it runs on more than one.
        **defaults: of those options of :data:`SHARED` that it has.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, default=json, help=f"record in this file; default: {json or 'none'}")
    made.add_argument("--commit", help="state of the code to record, where there is no git checkout")
    if device:
        made.add_argument("--device", type=device_type, default="auto", help="cpu, cuda; default: CUDA if there is one")
    for name, default in defaults.items():
        made.add_argument(f"--{name}", default=default, **SHARED[name])
    return made


def open_recording(arguments: argparse.Namespace, doc: str | None, *, keep: bool = False) -> Recording:
    """Open the file of ``--json`` for measurements, and prepare this process for them."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or every process announces its profiler
    allow_recompiles()
    return Recording(arguments.json, about(doc), keep=keep, commit=arguments.commit)


def allow_recompiles() -> None:
    """Let one function be compiled for every length and variant."""
    torch._dynamo.config.recompile_limit = 64


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
