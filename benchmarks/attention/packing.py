"""Documents of many lengths in one pack, beside a loop over them and a batch padded to the longest.

    OMP_WAIT_POLICY=passive python -m benchmarks.attention.packing --json benchmarks/results/packing_cpu.json
    python -m benchmarks.attention.packing --device cuda --json benchmarks/results/packing_cuda.json

One attention layer, forward and backward, the same documents and weights three ways. Times are medians of rounds in
which the three take turns in one process; peaks are those of the allocator, above the inputs, in a process for each.
Lengths are drawn evenly on a logarithmic scale. ``--compile`` compiles the layer, that of the loop for any length.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa import pack_padded, unpack_padded
from flexnsa.measure.memory import MIB, AllocatorProbe
from flexnsa.measure.process import run_fresh
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table
from flexnsa.models import PRESETS
from flexnsa.models.decoder import build_attention


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The layer of a preset and the lengths of the documents."""

    preset: str
    lengths: tuple[int, ...]
    device: str
    dtype: str
    compiled: bool

    def inputs(self) -> Tensor:
        """All documents end to end, ``(1, T, dim)``; a leaf."""
        torch.manual_seed(0)
        shape = (1, sum(self.lengths), PRESETS[self.preset].dim)
        return torch.randn(shape, device=self.device, dtype=getattr(torch, self.dtype), requires_grad=True)

    def layer(self) -> nn.Module:
        """The attention layer, always of the same weights."""
        torch.manual_seed(0)
        return build_attention(PRESETS[self.preset]).to(self.device, getattr(torch, self.dtype))


Run = Callable[[Tensor], Tensor]


def pack(setting: Setting) -> tuple[nn.Module, Run]:
    """One row of all documents."""
    layer = setting.layer()
    lengths = torch.tensor(setting.lengths)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(setting.device)
    attend = torch.compile(layer, fullgraph=True, dynamic=False) if setting.compiled else layer
    return layer, lambda x: attend(x, document_ids=document_ids)


def loop(setting: Setting) -> tuple[nn.Module, Run]:
    """One document after the other."""
    layer = setting.layer()
    attend = torch.compile(layer, fullgraph=True, dynamic=True) if setting.compiled else layer
    return layer, lambda x: torch.cat([attend(document) for document in x.split(setting.lengths, dim=1)], dim=1)


def pad(setting: Setting) -> tuple[nn.Module, Run]:
    """A row a document, all as long as the longest."""
    layer = setting.layer()
    lengths = torch.tensor(setting.lengths, device=setting.device)
    mask = torch.arange(max(setting.lengths), device=setting.device) < lengths[:, None]
    attend = torch.compile(layer, fullgraph=True, dynamic=False) if setting.compiled else layer
    return layer, lambda x: pack_padded(attend(unpack_padded(x, mask)), mask)[0]


WAYS = {"pack": pack, "loop": loop, "pad": pad}


def tokens_computed(way: str, setting: Setting) -> int:
    """Count the tokens that go through the layer, padding included."""
    return len(setting.lengths) * max(setting.lengths) if way == "pad" else sum(setting.lengths)


def step(layer: nn.Module, run: Run, x: Tensor) -> Tensor:
    """Run forward and backward to the inputs and all parameters; give the output."""
    out = run(x)
    torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out), materialize_grads=True)
    return out.detach()


def times(progress: Callable[[str], object], setting: Setting, rounds: int) -> dict[str, Any]:
    """Milliseconds of every round, and how far the outputs are from the loop's, relative to their size."""
    _allow_recompiles()
    x = setting.inputs()
    ways = {name: make(setting) for name, make in WAYS.items()}
    outputs = {}
    for name, (layer, run) in ways.items():
        progress(f"{name}, warming up")
        outputs[name] = step(layer, run, x).double()
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, (layer, run) in ways.items():
            progress(f"{name}, round {number + 1} of {rounds}")
            _synchronize(setting)
            start = time.perf_counter()
            step(layer, run, x)
            _synchronize(setting)
            milliseconds[name].append(1000 * (time.perf_counter() - start))
    size = outputs["loop"].norm()
    differences = {name: ((out - outputs["loop"]).norm() / size).item() for name, out in outputs.items()}
    return {"milliseconds": milliseconds, "differences": differences}


def memory(progress: Callable[[str], object], setting: Setting, way: str) -> dict[str, float]:
    """MiB allocated at the peak of a step, above the layer and its inputs."""
    _allow_recompiles()
    x = setting.inputs()
    layer, run = WAYS[way](setting)
    if setting.device == "cuda":
        progress("compiling")
        step(layer, run, x)
    with AllocatorProbe(setting.device) as probe:
        progress("forward and backward")
        step(layer, run, x)
        probe.mark("step")
    return {"peak_mib": probe.peak["step"] / MIB}


def measure(setting: Setting, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A point a way: median and all times, peak, and how many times those of the pack."""
    timed = run_fresh(times, setting, rounds, seconds=seconds)
    points = []
    for way in WAYS:
        point: dict[str, Any] = {"name": way, "tokens": tokens_computed(way, setting)}
        if "label" in timed:
            point["label"] = timed["label"]
        else:
            every = timed["milliseconds"][way]
            point |= {"ms": statistics.median(every), "all_ms": every, "difference": timed["differences"][way]}
        points.append(point | run_fresh(memory, setting, way, seconds=seconds))
    packed = points[0]
    for point in points:
        point |= {
            f"{key}_ratio": point[key] / packed[key] for key in ("ms", "peak_mib") if key in point and key in packed
        }
    return points


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line a way."""
    columns = (
        ("ms", ",.1f"),
        ("ms_ratio", ".2f"),
        ("peak_mib", ",.1f"),
        ("peak_mib_ratio", ".2f"),
        ("difference", ".1e"),
    )
    rows = []
    for point in points:
        cells = [format(point[key], style) if key in point else "-" for key, style in columns]
        rows.append([point["name"], f"{point['tokens']:,}", *cells, point.get("label", "")])
    return format_table(["", "tokens", "ms", "/ pack", "peak MiB", "/ pack", "difference", ""], rows)


def draw_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to ``longest``, evenly on a logarithmic scale; always the same."""
    draws = random.Random(0)
    return tuple(round(longest ** draws.random()) for _ in range(count))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="record here too")
    parser.add_argument("--documents", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--longest", type=int, help="tokens; default: 1024 on a CPU, 8192 on CUDA")
    parser.add_argument("--preset", choices=PRESETS, help="default: small on a CPU, large on CUDA")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, help="limit of one process; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the layer whole")
    options = parser.parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or every process announces its profiler
    cuda = options.device == "cuda"
    setting = Setting(
        preset=options.preset or ("large" if cuda else "small"),
        lengths=draw_lengths(options.documents, options.longest or (8192 if cuda else 1024)),
        device=options.device,
        dtype="bfloat16" if cuda else "float32",
        compiled=options.compile,
    )
    points = measure(setting, options.rounds, options.seconds)
    lengths = sorted(setting.lengths)
    print(
        f"{len(lengths)} documents of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):.0f}\n"
    )
    print(table(points))
    if options.json:
        recording = Recording(options.json, " ".join((__doc__ or "").split()))
        recording.note(setting=asdict(setting))
        for point in points:
            recording.add(point)


def _synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _allow_recompiles() -> None:
    """Let the loop have a graph for every kind of length: one token, no compressed token, one tile, and longer."""
    torch._dynamo.config.recompile_limit = 64


if __name__ == "__main__":
    main()
