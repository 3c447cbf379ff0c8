"""Time one decoded token on a GPU: NSA's layer and attention, and flash SDPA, eager, compiled and as a CUDA graph.

    python -m benchmarks decoding.gpu --json decode_gpu.json        # 100 seconds on an H200
    python -m benchmarks decoding.gpu --tiny --contexts 128 --batches 2     # a rehearsal, on a CPU too

One cache per batch size, as long as the longest context, serves every context, as it would in use: nothing is compiled
twice. Caches hold random numbers. Eager and compiled times are those of the wall over steps one after the other; a
graph's are CUDA events around each replay, the second-level cache flushed before. All are medians, recorded by context;
the label of a point is of the last context that could not be measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.decoding.check import check_decoding
from benchmarks.decoding.workloads import Dense, Paged, Sparse, Timed
from benchmarks.harness import options
from benchmarks.harness.graphs import capture
from benchmarks.harness.launches import count_launches
from benchmarks.harness.session import Point, Session
from benchmarks.harness.setting import published

WIDTH = 2560
"""Of the paper's model."""
PAGES = 16, 64, 128
"""Tokens of a page, as a serving engine has them."""


def wall_ms(session: Session, call: Timed, steps: int = 20, rounds: int = 5) -> float:
    """Time steps one after the other."""
    return session.wall.median(lambda: [call() for _ in range(steps)], rounds) / steps


def graph_ms(session: Session, call: Timed, rounds: int = 40) -> float:
    """Time replays of one step, captured in a CUDA graph."""
    replay, _ = capture(call)
    return session.clock.median(replay, rounds)


def launches(session: Session, call: Timed) -> dict[str, int]:
    """Count the kernels of a step, where that can be seen."""
    return {"kernels": count_launches(call)} if session.clock.cuda else {}


def race(session: Session, batch: int, contexts: Sequence[int]) -> None:
    """Measure all implementations of a batch size, longest context first."""
    setting, capacity = session.setting, max(contexts) + 1024
    pages = {f"NSA, pages of {size}": lambda size=size: Paged(Sparse(setting, batch, capacity), size) for size in PAGES}
    makers: dict[str, Callable[[], Sparse | Paged | Dense]] = {
        "NSA": lambda: Sparse(setting, batch, capacity),
        **(pages if setting.impl == "triton" else {}),
        "NSA, default settings": lambda: Sparse(setting, batch, capacity, preset="text"),
        "NSA, default settings, follows": lambda: Sparse(setting, batch, capacity, preset="text", follows=True),
        "flash SDPA": lambda: Dense(setting, batch, capacity, folded=False),
        "flash SDPA, folded": lambda: Dense(setting, batch, capacity, folded=True),
    }
    clocks = {"wall": wall_ms} | ({"graph": graph_ms} if session.clock.cuda else {})
    for name, make in makers.items():
        point: Point = {"batch": batch, "name": name}
        workload = session.attempt(point, make)
        if workload is None:
            session.recording.add(point)
            continue
        for part, calls in workload.calls().items():
            for mode, call in calls.items():
                measured: Point = point | {"part": part, "mode": mode}
                workload.go_to(min(contexts))
                seconds = session.attempt(measured, lambda call=call: session.wall.time(call) / 1e3)
                session.recording.add(measured)
                if seconds is None:
                    continue
                measured |= {"first_call_s": round(seconds, 1)} | launches(session, call)
                for context, (clock, measure) in itertools.product(sorted(contexts, reverse=True), clocks.items()):
                    workload.go_to(context)
                    ms = session.attempt(measured, lambda measure=measure, call=call: measure(session, call))
                    if ms is not None:
                        measured.setdefault(f"{clock}_ms", {})[str(context)] = ms
                        where = f"{batch:3d} {context:7,d} {part:9} {mode:8} {clock:5} {name:18}"
                        print(f"{where} {ms:8.3f} ms", flush=True)
                    session.recording.save()
        del workload
        if session.clock.cuda:
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "decode_gpu.json",
        seconds=230,
        contexts=[8192 * 2**power for power in range(5)],
        batches=[1, 32, 8, 64],
        tiny=False,
    )
    parser.add_argument("--most-tokens", type=int, default=64 * 131072, help="in all caches of a batch")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    setting = published(arguments.device, tiny=arguments.tiny, dim=WIDTH)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict() | {"batch": arguments.batches})
    session = Session(setting, recording, arguments.seconds)
    checked: Point = {"part": "check"}
    report = session.attempt(checked, lambda: check_decoding(setting.device, setting.impl)) or checked
    recording.note(correctness=report)
    print(report, flush=True)
    for batch in arguments.batches:
        race(session, batch, [context for context in arguments.contexts if context * batch <= arguments.most_tokens])
    print(f"{arguments.json}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
