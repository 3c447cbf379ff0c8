"""The selected branch in Triton on a GPU: first whether it is right, then its time and memory, then which tiles win.

    python -m benchmarks.kernels.selected_gpu --json selected.json --seconds 400
    python -m benchmarks.kernels.selected_gpu --json tuned.json --seconds 400 --tune
    python -m benchmarks.kernels.selected_gpu --json long.json --seconds 300 --long 524288

What matters most comes first, and every point is in the file as soon as it exists. Kernels are compiled by several
processes beforehand. With ``--smoke`` and ``TRITON_INTERPRET=1`` all of it runs on a CPU, at sizes that prove nothing.
Times are medians over CUDA events, in ms, with the second-level cache flushed before each; memory is the allocator's,
above the inputs, in MiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.selected_plans import LIMITS, SHAPES, TUNED, VARIANTS, Shape, Variant

WORKERS = 14
Record = Callable[[str, str, Callable[[], dict[str, Any]]], dict[str, Any]]
"""Take a point from a function, under a kind and a name."""


class Deadline:
    """The time limit of a run."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = time.monotonic(), seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def is_over(self) -> bool:
        """Whether nothing new should be begun."""
        return self.spent > self.seconds


def compile_ahead(jobs: list[tuple[Shape, Variant]], *, smoke: bool) -> None:
    """Run every kernel once at a small size, in processes that share Triton's cache; CUDA must not have started."""
    from benchmarks.kernels.selected_calls import warm

    if smoke:
        for job in jobs[:1]:
            warm(job)
        return
    with multiprocessing.get_context("fork").Pool(min(WORKERS, len(jobs))) as pool:
        for shape, variant, problem in pool.imap_unordered(warm, jobs):
            if problem:
                print(f"cannot run: {shape.name} {variant.name}: {problem}", flush=True)


def check(record: Record, deadline: Deadline, *, smoke: bool) -> None:
    """Compare with float64, and repeat."""
    from benchmarks.kernels.selected_checks import check_compiled, check_sample, checked_samples

    for sample in checked_samples(smoke=smoke):
        if deadline.is_over:
            return
        record("check", sample, lambda sample=sample: check_sample(sample))
    record("check", "one graph for all lengths, with documents and without", lambda: check_compiled(smoke=smoke))


def measure(record: Record, deadline: Deadline, shapes: list[Shape], *, flex: bool) -> None:
    """Time our kernels at all shapes, then FlexAttention."""
    from benchmarks.kernels.selected_calls import measure_flex, measure_ours

    for shape in shapes:
        if not deadline.is_over:
            record("time", shape.name, lambda shape=shape: measure_ours(shape, VARIANTS[0]))
    for shape in shapes if flex else ():
        if not deadline.is_over:
            record("FlexAttention", shape.name, lambda shape=shape: measure_flex(shape))


def tune(record: Record, deadline: Deadline, shapes: list[Shape]) -> None:
    """Time every variant at every shape, and say which was best."""
    from benchmarks.kernels.selected_calls import measure_ours

    best: dict[tuple[str, str], tuple[float, str]] = {}
    for shape in shapes:
        for variant in VARIANTS + LIMITS:
            if deadline.is_over:
                break
            point = record(
                "tune", f"{shape.name}: {variant.name}", lambda s=shape, v=variant: measure_ours(s, v, brief=True)
            )
            for which in ("forward", "backward"):
                if which in point:
                    best[shape.name, which] = min(
                        best.get((shape.name, which), (1e9, "")), (point[which], variant.name)
                    )
    for (name, which), (milliseconds, variant) in best.items():
        print(f"best {name:24s} {which:8s} {milliseconds:8.3f} ms  {variant}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tune", action="store_true", help="try all tiles instead")
    parser.add_argument("--long", type=int, help="check sampled rows at this length instead, forward and backward")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention")
    parser.add_argument("--shapes", nargs="+", help="names of shapes, instead of all")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    if options.smoke:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    deadline = Deadline(options.seconds)
    shapes = [s for s in (TUNED if options.tune else SHAPES) if not options.shapes or s.name in options.shapes]
    if options.smoke:
        shapes = [shape.small() for shape in shapes[:2]]
    if options.long is None:
        variants = VARIANTS + LIMITS if options.tune else VARIANTS[:1]
        compile_ahead([(shape, variant) for shape in shapes for variant in variants], smoke=options.smoke)
        print(f"compiled at {deadline.spent:.0f} s", flush=True)

    from benchmarks.harness.recording import Recording

    recording = Recording(options.json, (__doc__ or "").splitlines()[0])

    def record(kind: str, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        point: dict[str, Any] = {"kind": kind, "name": name}
        try:
            point |= action()
        except Exception as error:
            point["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        recording.add(point)
        print(f"{deadline.spent:5.0f} s ", *(f"{key} {value}" for key, value in point.items()), flush=True)
        return point

    if options.long is not None:
        from benchmarks.kernels.selected_checks import check_long

        record("long", f"{options.long} tokens", lambda: check_long(options.long, smoke=options.smoke))
        return
    if not options.no_check:
        check(record, deadline, smoke=options.smoke)
    if options.tune:
        tune(record, deadline, shapes)
    else:
        measure(record, deadline, shapes, flex=not options.no_flex)


if __name__ == "__main__":
    main()
