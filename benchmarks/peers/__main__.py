"""Measure flexnsa and other implementations of NSA: the selected branch, and the whole without its window.

    python -m benchmarks peers --json peers.json                             # about 5 minutes on an H200
    python -m benchmarks peers --device cpu --tiny --lengths 256 --rounds 1  # rehearse

Others are measured where they are installed: fla-core, native-sparse-attention-triton, Scalable-Flash-NSA. Each first
runs alone in a process of its own, which compiles, compares its selected branch with ours for the same blocks, and
finds out whether it gets through. Then those that did take turns in one process, round after round; times are medians
over CUDA events, forward and backward apart, the second-level cache flushed before each. Peak memory is the
allocator's, above the inputs. What each does otherwise than we do stands in the file, under "differences".
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import options
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.recording import Recording
from benchmarks.harness.session import Session
from benchmarks.harness.setting import Setting, published
from benchmarks.harness.workloads import Maker, Workload
from benchmarks.peers.autotuned import compile_configs_at_once
from benchmarks.peers.problem import Adapter, Problem
from benchmarks.peers.table import DIFFERENCES, TABLE, missing
from benchmarks.peers.trial import attempt

Key = tuple[str, str]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "peers_h200.json",
        seconds=300,
        lengths=[8192, 65536, 32768, 16384],
        rounds=7,
        tiny=False,
    )
    parser.add_argument("--only", nargs="+", choices=DIFFERENCES, help="default: all that are installed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    started = time.monotonic()
    # Compiled code is passed on by way of the disk. What fla finds best is not: trials share the device.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")
    setting = published(arguments.device, tiny=arguments.tiny)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict(), differences=DIFFERENCES, not_installed=missing())
    print(f"not installed: {', '.join(missing()) or 'none'}", flush=True)

    passed = _trials(setting, recording, arguments)
    print(f"tried at {time.monotonic() - started:.0f} s", flush=True)
    if setting.device == "cuda":  # fla tunes for each length, and compiles what it tunes
        compile_configs_at_once(os.cpu_count() or 1)
    session = Session(setting, recording, arguments.seconds - (time.monotonic() - started))
    for length in arguments.lengths:
        for kind, adapters in TABLE.items():
            makers = {name: _maker(adapters[name]) for name in adapters if length in passed.get((kind, name), ())}
            session.race(kind, makers, length, arguments.rounds)
    recording.note(seconds=round(time.monotonic() - started))


def _trials(setting: Setting, recording: Recording, arguments: argparse.Namespace) -> dict[Key, list[int]]:
    """Try all implementations at once, in half of the time, and give the lengths that each got through."""
    absent = missing()
    keys = [(kind, name) for kind, adapters in TABLE.items() for name in adapters if name not in absent]
    keys = [key for key in keys if not arguments.only or key[1] in arguments.only]

    def fresh(key: Key) -> dict[str, Any]:
        enough, most = 0.35 * arguments.seconds, 0.5 * arguments.seconds
        return run_fresh(attempt, setting, *key, arguments.lengths, enough, seconds=most, limit_memory=False)

    passed = {}
    with ThreadPoolExecutor(len(keys) if setting.device == "cuda" else 1) as pool:
        for key, result in zip(keys, pool.map(fresh, keys), strict=True):
            point = {"kind": f"trial, {key[0]}", "name": key[1], **result}
            recording.add(point)
            passed[key] = result.get("passed", [])
            print(*(f"{field} {value}" for field, value in point.items()), flush=True)
    return passed


def _maker(adapter: Adapter) -> Maker:
    def make(setting: Setting, length: int) -> Workload:
        return adapter(Problem.draw(setting, length))

    return make


if __name__ == "__main__":
    main()
