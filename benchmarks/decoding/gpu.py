"""Time one decoded token on a GPU: NSA's layer and attention beside flash SDPA, eager, compiled and as a CUDA graph.

    python -m benchmarks.decoding.cpu --device cuda --json decode_gpu.json        # 100 seconds on an H200

One cache per batch size, as long as the longest context, serves every context, as it would in use: nothing is compiled
twice. Caches hold random numbers. Eager and compiled times are those of the wall over steps one after the other; a
graph's are CUDA events around each replay, the second-level cache flushed before. All are medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.decoding.check import check_decoding
from benchmarks.decoding.contestants import Call, Dense, Shape, Sparse
from flexnsa.measure.recording import Recording


def wall_ms(call: Call, steps: int = 20, rounds: int = 5) -> float:
    """Time steps one after the other."""
    times = []
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        _wait()
        times.append((time.perf_counter() - start) / steps)
    return 1000 * statistics.median(times)


def graph_ms(call: Call, rounds: int = 40) -> float:
    """Capture one step in a CUDA graph and time its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        _wait()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def race(shape: Shape, batch: int, contexts: Sequence[int], recording: Recording, end: float) -> None:
    """Measure all contestants of a batch size, longest context first."""
    makers: dict[str, Callable[[], Sparse | Dense]] = {
        "NSA": lambda: Sparse(shape, batch, max(contexts) + 4096),
        "flash SDPA": lambda: Dense(shape, batch, max(contexts) + 4096, folded=False),
        "flash SDPA, folded": lambda: Dense(shape, batch, max(contexts) + 4096, folded=True),
    }
    for name, make in makers.items():
        point = {"batch": batch, "name": name}
        contestant = _attempt(make, point, recording, end)
        if contestant is None:
            continue
        for part, calls in contestant.calls().items():
            for mode, call in calls.items():
                labels = point | {"part": part, "mode": mode}
                begin = time.perf_counter()
                if not _attempt(lambda c=contestant, call=call: _first(c, call, contexts), labels, recording, end):
                    continue
                labels |= {"first_call_s": round(time.perf_counter() - begin, 1)}
                clocks = {"wall": wall_ms} | ({"graph": graph_ms} if shape.device == "cuda" else {})
                for context, (clock, measure) in itertools.product(sorted(contexts, reverse=True), clocks.items()):
                    contestant.go_to(context)
                    measured = labels | {"context": context, "clock": clock}
                    ms = _attempt(lambda measure=measure, call=call: measure(call), measured, recording, end)
                    if ms is not None:
                        recording.add(measured | {"ms": ms})
                        print(
                            f"{batch:3d} {context:7,d} {part:9} {mode:8} {clock:5} {name:18} {ms:8.3f} ms", flush=True
                        )
        del contestant
        if shape.device == "cuda":
            torch.cuda.empty_cache()


def _first(contestant: Sparse | Dense, call: Call, contexts: Sequence[int]) -> bool:
    contestant.go_to(min(contexts))
    call()
    _wait()
    return True


def _attempt(action: Callable[[], Any], point: dict[str, Any], recording: Recording, end: float) -> Any:
    """Do it unless time is up; what goes wrong becomes a point with a label and costs no other point."""
    try:
        if time.monotonic() > end:
            raise TimeoutError("over the time limit of the run")
        return action()
    except Exception as error:
        label = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        recording.add(point | {"label": label})
        print(f"{point}: {label}", flush=True)
        return None


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: argparse.Namespace) -> None:
    """Check, measure, print, record."""
    end = time.monotonic() + arguments.seconds
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    shape = Shape(impl=arguments.impl)
    if arguments.tiny:
        shape = Shape(
            dim=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=torch.float32,
            device="cpu",
            impl="sdpa",
            backend="aot_eager",
        )
    recording = Recording(arguments.json, " ".join((__doc__ or "").split()), commit=arguments.commit)
    recording.note(setting={name: str(value) for name, value in vars(shape).items()})
    report = _attempt(lambda: check_decoding(shape.device, shape.impl), {"part": "check"}, recording, end)
    recording.note(correctness=report)
    print(report, flush=True)
    for batch in arguments.batches:
        contexts = [context for context in arguments.contexts if context * batch <= arguments.most_tokens]
        race(shape, batch, contexts, recording, end)
    print(f"{arguments.json}, {time.monotonic() - end + arguments.seconds:.0f} s")
