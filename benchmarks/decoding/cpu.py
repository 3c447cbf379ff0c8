"""Time one decoded token over the context, one layer of the ``large`` preset, against dense attention in the same run.

    OMP_WAIT_POLICY=passive python -m benchmarks.decoding.cpu --json decode.json
    python -m benchmarks.decoding.cpu --device cuda --json decode_gpu.json      # see decode_gpu.py

The caches are full of random numbers: what a step costs does not depend on them. Times are processor seconds of one
thread, which a busy machine stretches less than those of the clock; medians of rounds in which everybody has a turn.
Dense attention runs twice: as it is called everywhere (``enable_gqa``), and with the heads of a group folded into rows,
which reads each key once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa import NativeSparseAttention, NSACache
from flexnsa.functional import attend, implementation
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table
from flexnsa.models import DenseAttention, preset
from flexnsa.reads import ReadCounter
from flexnsa.rope import rotate

MODEL = preset("large")
HEADS = (MODEL.dim, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
ROW_BYTES = 2 * MODEL.head_dim * 4
"""A key and its value, fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One context: what a step reads (keys of one kv head, bytes of all) and milliseconds by contestant."""

    context: int
    keys: dict[str, int]
    bytes_read: int
    dense_keys: int
    dense_bytes_read: int
    cache_bytes: int
    layer_ms: dict[str, float]
    attention_ms: dict[str, float]


class SparseStep:
    """The layer with a cache of ``context`` tokens, one token after the other at the same place."""

    def __init__(self, context: int, impl: str, compiled: bool) -> None:
        self.layer = NativeSparseAttention(*HEADS, config=MODEL.nsa, impl=impl).requires_grad_(False)
        self.cache = self.layer.new_cache(1, context + 1)
        for buffer in self.cache.buffers.values():
            buffer.normal_()
        self.context = context
        self.cache.lengths.fill_(context)
        torch.compiler.reset()
        self.step = torch.compile(self.layer, fullgraph=True) if compiled else self.layer
        self.q = torch.randn(1, MODEL.num_heads, 1, MODEL.head_dim)
        self.gates = torch.rand(1, MODEL.num_heads, 1, 3)
        self.window = torch.randn(2, 1, MODEL.num_kv_heads, MODEL.nsa.window_size, MODEL.head_dim).unbind()
        self.places = self.cache.begin(1)

    def __call__(self, x: Tensor) -> None:
        """Decode a token and go back to where it was."""
        self.step(x, cache=self.cache)
        self.cache.lengths.fill_(self.context)

    def attention(self) -> None:
        """The three branches and the selection alone."""
        cache, places, (k_win, v_win) = self.cache, self.places, self.window
        attend(
            implementation(self.layer.impl, self.q, cached=True),
            self.q,
            cache.all("k_slc"),
            cache.all("v_slc"),
            self.gates,
            k_cmp=cache.all("k_cmp"),
            v_cmp=cache.all("v_cmp"),
            k_win=k_win,
            v_win=v_win,
            positions=places.positions,
            window_positions=places.window_positions,
            config=MODEL.nsa,
            scale=MODEL.head_dim**-0.5,
        )

    def reads(self, x: Tensor) -> ReadCounter:
        """Count what one step reads."""
        self.cache.reads = ReadCounter()
        self.layer(x, cache=self.cache)
        self.cache.lengths.fill_(self.context)
        counter, self.cache.reads = self.cache.reads, None
        return counter


class DenseStep:
    """Dense attention with a cache that is exactly full, so that it needs no mask."""

    def __init__(self, context: int, folded: bool) -> None:
        self.layer = DenseAttention(*HEADS).requires_grad_(False)
        self.context, self.folded = context, folded
        self.k, self.v = torch.randn(2, 1, MODEL.num_kv_heads, context + 1, MODEL.head_dim).unbind()
        self.q = torch.randn(1, MODEL.num_heads, 1, MODEL.head_dim)

    def __call__(self, x: Tensor) -> None:
        """Decode a token: project, turn, put into the cache, attend, project."""
        layer, position = self.layer, torch.tensor([self.context])
        split = (MODEL.num_kv_heads, MODEL.head_dim)
        q = rotate(layer.w_q(x).unflatten(-1, (MODEL.num_heads, -1)).transpose(1, 2), position, layer.rope_base)
        self.k[:, :, -1:] = rotate(layer.w_k(x).unflatten(-1, split).transpose(1, 2), position, layer.rope_base)
        self.v[:, :, -1:] = layer.w_v(x).unflatten(-1, split).transpose(1, 2)
        layer.w_o(self._attend(q).transpose(1, 2).flatten(2))

    def attention(self) -> None:
        """SDPA alone."""
        self._attend(self.q)

    def _attend(self, q: Tensor) -> Tensor:
        if not self.folded:
            return F.scaled_dot_product_attention(q, self.k, self.v, enable_gqa=True)
        rows = q.reshape(1, MODEL.num_kv_heads, -1, MODEL.head_dim)
        return F.scaled_dot_product_attention(rows, self.k, self.v).reshape(q.shape)


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor time of each call, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):  # two turns to warm up
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if turn > 1:
                times[name].append(1000 * (time.thread_time() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(context: int, arguments: argparse.Namespace) -> Point:
    """Run all contestants at one context."""
    x = torch.randn(1, 1, MODEL.dim)
    sparse = SparseStep(context, arguments.impl, arguments.compile)
    steps: dict[str, Any] = {
        "NSA": sparse,
        "dense": DenseStep(context, folded=False),
        "dense, folded": DenseStep(context, folded=True),
    }
    counter = sparse.reads(x)
    keys = {tag: count // MODEL.num_kv_heads for tag, count in counter.keys.items()}
    return Point(
        context=context,
        keys=keys,
        bytes_read=sum(counter.bytes.values()),
        dense_keys=context + 1,
        dense_bytes_read=(context + 1) * ROW_BYTES * MODEL.num_kv_heads,
        cache_bytes=sparse.cache.num_bytes,
        layer_ms=milliseconds({name: lambda step=step: step(x) for name, step in steps.items()}, arguments.rounds),
        attention_ms=milliseconds({name: step.attention for name, step in steps.items()}, arguments.rounds),
    )


def growth_bytes(num_steps: int) -> int:
    """How much larger the process is after so many steps that do grow the sequence."""
    layer = NativeSparseAttention(*HEADS, config=MODEL.nsa, impl="sdpa").requires_grad_(False)
    cache: NSACache = layer.new_cache(1, num_steps + 200)
    x = torch.randn(1, 1, MODEL.dim)
    for buffer in cache.buffers.values():
        buffer.normal_()  # so that all of it is resident
    sizes = []
    for count in (200, num_steps):
        for _ in range(count):
            layer(x, cache=cache)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return sizes[1] - sizes[0]


def table(points: list[Point]) -> str:
    """One line a context."""
    header = ["context", "keys read", "dense", "MB read", "dense", "fewer"]
    header += ["layer ms", "dense", "dense folded", "ratio", "to folded"]
    header += ["attention ms", "dense", "dense folded", "ratio", "to folded"]
    rows = []
    for point in points:
        cells = [f"{point.context:,}", f"{sum(point.keys.values()):,}", f"{point.dense_keys:,}"]
        cells += [f"{size / 1e6:.2f}" for size in (point.bytes_read, point.dense_bytes_read)]
        cells.append(f"{point.dense_bytes_read / point.bytes_read:.1f}x")
        for ms in (point.layer_ms, point.attention_ms):
            own, dense, folded = ms.values()
            cells += [f"{own:.2f}", f"{dense:.2f}", f"{folded:.2f}", f"{dense / own:.1f}x", f"{folded / own:.1f}x"]
        rows.append(cells)
    return format_table(header, rows)


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", help="default: 1k to 64k, on CUDA 8k to 128k")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each contestant; default: %(default)s")
    parser.add_argument("--impl", choices=("sdpa", "flex"), help="default: sdpa, on CUDA flex")
    parser.add_argument("--compile", action="store_true", help="the NSA layer as one graph, never compiled twice")
    parser.add_argument("--growth-steps", type=int, default=1000, help="steps to watch the memory of; 0: none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    on_cuda = parser.add_argument_group("with --device cuda")
    on_cuda.add_argument("--batches", type=int, nargs="+", default=[32, 1], help="default: %(default)s")
    on_cuda.add_argument("--most-tokens", type=int, default=32 * 65536, help="in all caches of a batch")
    on_cuda.add_argument("--seconds", type=float, default=230, help="stop measuring then; default: %(default)s")
    on_cuda.add_argument("--commit", help="state of the code, where there is no git checkout")
    on_cuda.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    arguments = parser.parse_args()
    arguments.impl = arguments.impl or ("sdpa" if arguments.device == "cpu" else "flex")
    if arguments.device == "cuda":
        from benchmarks.decoding import gpu

        arguments.contexts = arguments.contexts or [8192 * 2**power for power in range(5)]
        gpu.main(arguments)
        return
    arguments.contexts = arguments.contexts or [1024 * 2**power for power in range(7)]
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch._dynamo.config.error_on_recompile = True
    torch.manual_seed(0)
    recording = Recording(arguments.json, " ".join((__doc__ or "").split())) if arguments.json else None
    points = []
    for context in arguments.contexts:
        points.append(measure(context, arguments))
        if recording is not None:
            recording.add(asdict(points[-1]))
    print(table(points))
    growth = growth_bytes(arguments.growth_steps) if arguments.growth_steps else None
    if growth is not None:
        print(f"\nThe process grew by {growth / 2**20:.2f} MiB over {arguments.growth_steps} steps.")
    if recording is not None:
        options = {"impl": arguments.impl, "compile": arguments.compile, "rounds": arguments.rounds}
        recording.note(dtype="float32", **options, growth_bytes=growth)


if __name__ == "__main__":
    main()
