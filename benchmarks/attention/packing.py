"""Documents of many lengths in one pack, in a loop over them, and in a batch padded to the longest.

    OMP_WAIT_POLICY=passive python -m benchmarks attention.packing --json benchmarks/results/packing_cpu.json
    python -m benchmarks attention.packing --device cuda --json benchmarks/results/packing_cuda.json

One attention layer, forward and backward, the same documents and weights three ways. Times are medians of rounds in
which the three take turns in one process; peaks are those of the allocator, above the inputs, in a process for each.
Lengths are drawn evenly on a logarithmic scale. ``--compile`` compiles the layer, that of the loop for any length.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import options
from benchmarks.harness.check import relative_error
from benchmarks.harness.clock import Clock
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.memory import AllocatorProbe
from flexnsa import pack_padded, unpack_padded
from flexnsa.lm import PRESETS
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.measure.table import format_table
from flexnsa.lm.model.decoder import build_attention


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The layer of a preset and the lengths of the documents that it reads."""

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

    def compile(self, layer: nn.Module, *, dynamic: bool = False) -> Callable[..., Tensor]:
        """Compile the layer whole, if that is asked for."""
        return torch.compile(layer, fullgraph=True, dynamic=dynamic) if self.compiled else layer


Run = Callable[[Tensor], Tensor]


def pack(documents: Documents) -> tuple[nn.Module, Run]:
    layer = documents.layer()
    lengths = torch.tensor(documents.lengths)
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None].to(documents.device)
    attend = documents.compile(layer)
    return layer, lambda x: attend(x, document_ids=document_ids)


def loop(documents: Documents) -> tuple[nn.Module, Run]:
    layer = documents.layer()
    attend = documents.compile(layer, dynamic=True)
    return layer, lambda x: torch.cat([attend(document) for document in x.split(documents.lengths, dim=1)], dim=1)


def pad(documents: Documents) -> tuple[nn.Module, Run]:
    """A row a document, all as long as the longest."""
    layer = documents.layer()
    lengths = torch.tensor(documents.lengths, device=documents.device)
    mask = torch.arange(max(documents.lengths), device=documents.device) < lengths[:, None]
    attend = documents.compile(layer)
    return layer, lambda x: pack_padded(attend(unpack_padded(x, mask)), mask)[0]


WAYS = {"pack": pack, "loop": loop, "pad": pad}


def tokens_computed(way: str, documents: Documents) -> int:
    """Count the tokens that go through the layer, padding included."""
    return len(documents.lengths) * max(documents.lengths) if way == "pad" else sum(documents.lengths)


def step(layer: nn.Module, run: Run, x: Tensor) -> Tensor:
    """Run forward and backward to the inputs and all parameters; give the output."""
    out = run(x)
    torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out), materialize_grads=True)
    return out.detach()


def times(progress: Callable[[str], object], documents: Documents, rounds: int) -> dict[str, Any]:
    """Median milliseconds, and how far the outputs are from the loop's, relative to their size."""
    options.allow_recompiles()
    x = documents.inputs()
    ways = {name: make(documents) for name, make in WAYS.items()}
    outputs = {}
    for name, (layer, run) in ways.items():
        progress(f"{name}, warming up")
        outputs[name] = step(layer, run, x)
    steps = {name: partial(step, layer, run, x) for name, (layer, run) in ways.items()}
    milliseconds = Clock("wall", documents.device).turns(steps, rounds, progress=progress)
    medians = {name: statistics.median(column) for name, column in milliseconds.items()}
    differences = {name: relative_error(out, outputs["loop"]) for name, out in outputs.items()}
    return {"ms": medians, "differences": differences}


def memory(progress: Callable[[str], object], documents: Documents, way: str) -> dict[str, float]:
    """MiB allocated at the peak of a step, above the layer and its inputs."""
    options.allow_recompiles()
    x = documents.inputs()
    layer, run = WAYS[way](documents)
    if documents.device == "cuda":
        progress("compiling")
        step(layer, run, x)
    with AllocatorProbe(documents.device) as probe:
        progress("forward and backward")
        step(layer, run, x)
        probe.mark("step")
    return {"peak_mib": probe.peak["step"] / MIB}


def measure(documents: Documents, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A point a way: median time, difference to the loop's output, and peak."""
    timed = run_fresh(times, documents, rounds, seconds=seconds)
    points = []
    for way in WAYS:
        point: dict[str, Any] = {"name": way, "tokens": tokens_computed(way, documents)}
        if "label" in timed:
            point["label"] = timed["label"]
        else:
            point |= {"ms": timed["ms"][way], "difference": timed["differences"][way]}
        points.append(point | run_fresh(memory, documents, way, seconds=seconds))
    return points


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line a way; ratios to the pack, the first."""
    rows = []
    for point in points:
        cells = []
        for key in ("ms", "peak_mib"):
            cells.append(f"{point[key]:,.1f}" if key in point else "-")
            cells.append(f"{point[key] / points[0][key]:.2f}" if key in point and key in points[0] else "-")
        cells.append(f"{point['difference']:.1e}" if "difference" in point else "-")
        rows.append([point["name"], f"{point['tokens']:,}", *cells, point.get("label", "")])
    return format_table(["", "tokens", "ms", "/ pack", "peak MiB", "/ pack", "difference", ""], rows)


def draw_lengths(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to ``longest``, evenly on a logarithmic scale; always the same."""
    draws = random.Random(0)
    return tuple(round(longest ** draws.random()) for _ in range(count))


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, seconds=600, rounds=7)
    parser.add_argument("--documents", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--longest", type=int, help="tokens; default: 1024 on a CPU, 8192 on CUDA")
    parser.add_argument("--preset", choices=PRESETS, help="default: small on a CPU, large on CUDA")
    parser.add_argument("--compile", action="store_true", help="compile the layer whole")
    arguments = parser.parse_args(argv)
    cuda = arguments.device == "cuda"
    documents = Documents(
        preset=arguments.preset or ("large" if cuda else "small"),
        lengths=draw_lengths(arguments.documents, arguments.longest or (8192 if cuda else 1024)),
        device=arguments.device,
        dtype="bfloat16" if cuda else "float32",
        compiled=arguments.compile,
    )
    points = measure(documents, arguments.rounds, arguments.seconds)
    lengths = sorted(documents.lengths)
    print(
        f"{len(lengths)} documents of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):.0f}\n"
    )
    print(table(points))
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=asdict(documents))
    for point in points:
        recording.add(point)


if __name__ == "__main__":
    main()
