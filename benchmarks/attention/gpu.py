"""Measure attention on a GPU: correctness, then time and memory of the whole and of each phase, and of dense attention.

    python -m benchmarks attention.gpu --json gpu.json            # about 7 minutes on an H200
    python -m benchmarks attention.gpu --json gpu.json --quick    # about 2: two lengths, no phases
    python -m benchmarks attention.gpu --device cpu --tiny --lengths 256 --phases-at 256 --memory-at 512    # rehearse

Implementations run in turn at each length, round after round, in one process; times are medians over CUDA events,
forward and backward apart, the second-level cache flushed before each; those "captured" are of both as one CUDA graph.
Peak memory is the allocator's above the inputs. Nothing but this package, torch and triton is needed;
flash-linear-attention is measured where it is installed. Compiled code goes to a new cache unless
TORCHINDUCTOR_CACHE_DIR names one: compile times are those of a first call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.attention.compile_ahead import CompileAhead
from benchmarks.attention.exponents import report
from benchmarks.harness import options
from benchmarks.harness.check import check
from benchmarks.harness.phases import PHASES
from benchmarks.harness.session import Session
from benchmarks.harness.setting import published
from benchmarks.harness.workloads import WHOLE, Maker, captured

TABLES = {"whole": WHOLE, "phase": PHASES}
UNCOMPILED = ("cuDNN SDPA", "flash SDPA", "math SDPA", "score", "lists", "fla: selected branch")
CAPTURED = ("NSA", "cuDNN SDPA")
LONGEST_MATH = 8192
"""Longer, the scores of math SDPA alone take more than 30 GiB; its curve is known by then."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "gpu.json",
        seconds=450,
        lengths=[65536, 8192, 32768, 16384],
        rounds=9,
        impl="triton",
        tiny=False,
    )
    parser.add_argument("--phases-at", type=int, nargs="*", default=[65536, 8192], help="lengths to take apart")
    parser.add_argument(
        "--memory-at", type=int, nargs="*", default=[131072], help="lengths of which only memory is asked"
    )
    parser.add_argument("--captured-at", type=int, nargs="*", default=[8192], help="lengths of CUDA graphs")
    parser.add_argument("--quick", action="store_true", help="8k and 32k, no phases, no 128k")
    parser.add_argument("--skip-check", action="store_true", help="measure without checking first")
    parser.add_argument("--compile-only", nargs=2, metavar=("KIND", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.lengths, arguments.phases_at, arguments.memory_at = [8192, 32768], [], []
        arguments.captured_at = []
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    setting = published(arguments.device, tiny=arguments.tiny, impl=arguments.impl)
    start = time.monotonic()
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict(), argv=list(sys.argv[1:] if argv is None else argv))
    if arguments.compile_only:
        kind, length = arguments.compile_only[0], int(arguments.compile_only[1])
        makers = {name: make for name, make in TABLES[kind].items() if name not in UNCOMPILED}
        Session(setting, recording, arguments.seconds).race(kind, makers, length, rounds=0)
        return

    jobs = [("whole", length) for length in (*arguments.lengths, *arguments.memory_at)]
    jobs += [("phase", length) for length in arguments.phases_at]
    ahead = CompileAhead(arguments, jobs, 0.5 * arguments.seconds)
    if not arguments.skip_check:
        recording.note(correctness=check(setting))
    recording.note(compiled_ahead=ahead.points())
    print(f"compiled {len(jobs)} jobs by {time.monotonic() - start:.0f} s", flush=True)

    session = Session(setting, recording, arguments.seconds - (time.monotonic() - start))
    for length in arguments.lengths:
        session.race("whole", _whole(length), length, arguments.rounds)
        if length in arguments.captured_at and setting.device == "cuda":
            session.race("captured", {name: captured(WHOLE[name]) for name in CAPTURED}, length, arguments.rounds)
        if length in arguments.phases_at:
            session.race("phase", PHASES, length, arguments.rounds)
    for length in arguments.memory_at:
        session.race("whole", _whole(length), length, rounds=0)
    recording.note(seconds=round(time.monotonic() - start))
    print(f"\n{report(recording.content)}\n")
    print(f"{arguments.json}, after {time.monotonic() - start:.0f} s")


def _whole(length: int) -> dict[str, Maker]:
    return {name: make for name, make in WHOLE.items() if name != "math SDPA" or length <= LONGEST_MATH}


if __name__ == "__main__":
    main()
