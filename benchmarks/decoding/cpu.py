"""Time one decoded token over the context, one layer of the ``large`` preset, against dense attention in the same run.

    OMP_WAIT_POLICY=passive python -m benchmarks decoding.cpu --json decode.json

The caches are full of random numbers: what a step costs does not depend on them. Times are processor seconds of one
thread, which a busy machine stretches less than those of the clock; medians of rounds in which all run in turn.
Dense attention runs twice: as it is called everywhere (``enable_gqa``), and with the heads of a group folded into rows,
which reads each key once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.decoding.workloads import Dense, Sparse
from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.setting import CPU, Setting
from flexnsa import NativeSparseAttention, NSACache
from flexnsa.cache.steps import ReadCounter
from flexnsa.lm.measure.table import format_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One context: what a step reads (keys of one kv head, bytes of all) and milliseconds by workload."""

    context: int
    keys: dict[str, int]
    bytes_read: int
    dense_keys: int
    dense_bytes_read: int
    cache_bytes: int
    layer_ms: dict[str, float]
    attention_ms: dict[str, float]


def measure(setting: Setting, context: int, rounds: int) -> Point:
    """Run all implementations at one context."""
    torch.compiler.reset()
    sparse, eager = Sparse(setting, batch=1, capacity=context + 1), replace(setting, backend=None)
    dense = {
        "dense": Dense(eager, batch=1, capacity=context + 1, folded=False),
        "dense, folded": Dense(eager, batch=1, capacity=context + 1, folded=True),
    }
    for workload in (sparse, *dense.values()):
        workload.go_to(context)
    layer = sparse.calls()["layer"]["compiled"]  # not compiled, unless asked for

    def decode() -> None:
        """Decode a token and go back to where it was."""
        layer()
        sparse.cache.lengths.fill_(context)

    sparse.cache.reads = ReadCounter()
    sparse.layer(sparse.x, cache=sparse.cache)
    counter, sparse.cache.reads = sparse.cache.reads, None
    sparse.cache.lengths.fill_(context)
    layers = {"NSA": decode} | {name: step.calls()["layer"]["compiled"] for name, step in dense.items()}
    attentions = {name: step.calls()["attention"]["eager"] for name, step in {"NSA": sparse, **dense}.items()}
    clock = Clock("thread")
    return Point(
        context=context,
        keys={tag: count // setting.num_kv_heads for tag, count in counter.keys.items()},
        bytes_read=sum(counter.bytes.values()),
        dense_keys=context + 1,
        dense_bytes_read=(context + 1) * setting.num_kv_heads * 2 * setting.head_dim * setting.dtype.itemsize,
        cache_bytes=sparse.cache.num_bytes,
        layer_ms=clock.medians(layers, rounds, warm_up=2),
        attention_ms=clock.medians(attentions, rounds, warm_up=2),
    )


def growth_bytes(num_steps: int) -> int:
    """How much larger the process is after so many steps that do grow the sequence."""
    layer = NativeSparseAttention(*CPU.heads, config=CPU.config, impl="sdpa").requires_grad_(False)
    cache: NSACache = layer.new_cache(1, num_steps + 200)
    x = CPU.random(1, 1, CPU.heads[0])
    for buffer in cache.buffers.values():
        buffer.normal_()  # so that all of it is resident
    sizes = []
    for count in (200, num_steps):
        for _ in range(count):
            layer(x, cache=cache)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return sizes[1] - sizes[0]


def table(points: list[Point]) -> str:
    header = ["context", "keys read", "dense", "MB read", "dense", "fewer"]
    header += ["layer ms", "dense", "dense folded", "ratio", "to folded"]
    header += ["attention ms", "dense", "dense folded", "ratio", "to folded"]
    rows = []
    for point in points:
        cells = [f"{point.context:,}", f"{sum(point.keys.values()):,}", f"{point.dense_keys:,}"]
        cells += [f"{size / 1e6:.2f}" for size in (point.bytes_read, point.dense_bytes_read)]
        cells.append(f"{point.dense_bytes_read / point.bytes_read:.1f}x")
        for ms in (point.layer_ms, point.attention_ms):
            nsa, dense, folded = ms.values()
            cells += [f"{nsa:.2f}", f"{dense:.2f}", f"{folded:.2f}", f"{dense / nsa:.1f}x", f"{folded / nsa:.1f}x"]
        rows.append(cells)
    return format_table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, device=False, contexts=[1024 * 2**power for power in range(7)], rounds=30)
    parser.add_argument("--impl", choices=("sdpa", "flex"), default="sdpa", help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="the NSA layer as one graph, never compiled twice")
    parser.add_argument("--growth-steps", type=int, default=1000, help="steps to watch the memory of; 0: none")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch._dynamo.config.error_on_recompile = True
    torch.manual_seed(0)
    setting = replace(CPU, impl=arguments.impl, backend="inductor" if arguments.compile else None)
    recording = options.open_recording(arguments, __doc__)
    points = []
    for context in arguments.contexts:
        points.append(measure(setting, context, arguments.rounds))
        recording.add(asdict(points[-1]))
    print(table(points))
    growth = growth_bytes(arguments.growth_steps) if arguments.growth_steps else None
    if growth is not None:
        print(f"\nThe process grew by {growth / 2**20:.2f} MiB over {arguments.growth_steps} steps.")
    noted = {"impl": arguments.impl, "compile": arguments.compile, "rounds": arguments.rounds}
    recording.note(dtype="float32", **noted, growth_bytes=growth)


if __name__ == "__main__":
    main()
