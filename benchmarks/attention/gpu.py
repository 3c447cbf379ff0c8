"""Measure flexnsa on a GPU: correctness, then time and memory of the whole and of each phase, beside dense attention.

    benchmarks/gpu.sh --out gpu.json            # about 7 minutes on an H200
    benchmarks/gpu.sh --out gpu.json --quick    # about 2: two lengths, no phases

Contestants of one length run in turn, round after round, in one process; times are medians over CUDA events, forward
and backward apart, the second-level cache flushed before each. Peak memory is the allocator's, above the inputs.
Nothing but this package, torch and triton is needed; flash-linear-attention is measured where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.check import check
from benchmarks.harness.contestants import PHASES, WHOLE, Contestant, Maker, Setting
from flexnsa.measure.recording import Recording

MIB = 2**20


class Clock:
    """Time stamps on the device's own clock, or on the wall where there is none."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.flush = torch.empty(256 * MIB, dtype=torch.int8, device=device) if self.cuda else None

    def stamps(self, contestant: Contestant, upstream: Any) -> list[Any]:
        """Run once: stamps before forward, between, and after backward."""
        if self.flush is not None:
            self.flush.zero_()
        stamps = [self._now()]
        out = contestant.function(*contestant.inputs)
        stamps.append(self._now())
        if contestant.differentiate:
            torch.autograd.grad(out, contestant.differentiate, upstream)
            stamps.append(self._now())
        return stamps

    def intervals(self, stamps: Sequence[Any]) -> list[float]:
        """Milliseconds between stamps; waits for the device."""
        self.wait()
        pairs = itertools.pairwise(stamps)
        return [a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs]

    def wait(self) -> None:
        """Until the device has done all that it was asked to."""
        if self.cuda:
            torch.cuda.synchronize()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Session:
    """One run of this script: what is left of its time, and where its points go."""

    def __init__(self, setting: Setting, recording: Recording, seconds: float) -> None:
        self.setting, self.recording = setting, recording
        self.clock = Clock(setting.device)
        self.end = time.monotonic() + seconds

    def race(self, kind: str, makers: dict[str, Maker], length: int, rounds: int) -> None:
        """Measure the contestants of one length: memory each alone, then time in turn."""
        points, ready = {}, {}
        for name, make in makers.items():
            point = points[name] = {"kind": kind, "name": name, "seq_len": length}
            self._attempt(
                point, lambda name=name, make=make, point=point: ready.update({name: self._start(make, length, point)})
            )
            if rounds == 0:
                ready.clear()  # only memory is asked for: no contestant stands in another's way
            self.recording.add(point)
        times: dict[str, list[list[float]]] = {name: [] for name in ready}
        for _ in range(rounds):
            for name, (contestant, upstream) in list(ready.items()):
                if time.monotonic() > self.end:
                    break

                def once(name: str = name, contestant: Contestant = contestant, upstream: Any = upstream) -> None:
                    times[name].append(self.clock.intervals(self.clock.stamps(contestant, upstream)))

                if not self._attempt(points[name], once):
                    del ready[name]
        for name, rows in times.items():
            if rows:
                points[name].update(_summary(rows))
            print(_line(points[name]), flush=True)
        self.recording.save()

    def _start(self, make: Maker, length: int, point: dict[str, Any]) -> tuple[Contestant, Any]:
        """First call, which compiles, and a second that shows the memory."""
        torch.manual_seed(0)
        contestant = make(self.setting, length)
        begin = time.perf_counter()
        with torch.no_grad():
            upstream = None
        out = contestant.function(*contestant.inputs)
        if contestant.differentiate:
            upstream = torch.randn_like(out)
            torch.autograd.grad(out, contestant.differentiate, upstream)
        self.clock.wait()
        point["first_call_s"] = round(time.perf_counter() - begin, 2)
        del out
        if self.clock.cuda and contestant.differentiate:
            point.update(_memory(contestant, upstream))
        return contestant, upstream

    def _attempt(self, point: dict[str, Any], action: Callable[[], object]) -> bool:
        """Do it unless time is up; what goes wrong becomes the point's label and costs no other point."""
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("over the time limit of the run")
            action()
        except torch.OutOfMemoryError:
            point["label"] = "out of memory"
        except TimeoutError as error:
            point["label"] = str(error)
        except Exception as error:
            point["label"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
        if "label" in point:
            print(f"{point['seq_len']:7d}  {point['name']}: {point['label']}", flush=True)
            gc.collect()
            if self.clock.cuda:
                torch.cuda.empty_cache()
        return "label" not in point


def slopes(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Exponents ``log2(x(2S) / x(S))`` between neighbouring lengths, of every quantity of every contestant."""
    found: dict[str, dict[str, list[float]]] = {}
    for quantity in ("peak_mib", "saved_mib", "forward_ms", "backward_ms"):
        for name in dict.fromkeys(point["name"] for point in points):
            curve = sorted((p["seq_len"], p[quantity]) for p in points if p["name"] == name and p.get(quantity))
            steps = [round(log2(y2 / y1) / log2(x2 / x1), 3) for (x1, y1), (x2, y2) in itertools.pairwise(curve)]
            if steps:
                found.setdefault(name, {})[quantity] = steps
    return found


class CompileAhead:
    """Compiles every job in a process of its own, all at once, into the cache that the measurement then uses."""

    def __init__(self, options: argparse.Namespace, jobs: Sequence[tuple[str, int]], seconds: float) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.end = time.monotonic() + seconds
        self.running: list[tuple[Path, subprocess.Popen[bytes]]] = []
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
        for kind, length in jobs:
            file = Path(self.folder.name) / f"{kind}-{length}.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.attention.gpu",
                "--out",
                str(file),
                "--compile-only",
                kind,
                str(length),
            ]
            command += ["--seconds", str(seconds), "--device", options.device, *(["--tiny"] if options.tiny else [])]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            self.running.append((file, process))

    def points(self) -> list[dict[str, Any]]:
        """Wait, and give the time of every first call."""
        for _, process in self.running:
            try:
                process.wait(max(1.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        files = [file for file, _ in self.running if file.exists()]
        points = [point for file in files for point in json.loads(file.read_text())["points"]]
        fields = ("kind", "name", "seq_len", "first_call_s", "label")
        return [{field: point[field] for field in fields if field in point} for point in points]


def _memory(contestant: Contestant, upstream: Any) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = contestant.function(*contestant.inputs)
    after = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(out, contestant.differentiate, upstream)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del out, gradients
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(contestant)}
    return {
        "inputs_mib": sum(storages.values()) / MIB,
        "saved_mib": (after - before) / MIB,
        "peak_mib": (peak - before) / MIB,
    }


def _tensors(contestant: Contestant) -> list[Tensor]:
    return [x for x in (*contestant.inputs, *contestant.differentiate) if isinstance(x, Tensor)]


def _summary(rows: list[list[float]]) -> dict[str, Any]:
    names = ("forward_ms", "backward_ms")[: len(rows[0])]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    medians = {name: statistics.median(column) for name, column in columns.items()}
    return medians | {"rounds": len(rows), "all_ms": {name: list(column) for name, column in columns.items()}}


def _line(point: dict[str, Any]) -> str:
    cells = [f"{point['seq_len']:7d}  {point['name']:22}"]
    for field, unit in (("forward_ms", "ms forward"), ("backward_ms", "ms backward"), ("peak_mib", "MiB peak")):
        if field in point:
            cells.append(f"{point[field]:10.2f} {unit}")
    return "".join(cells)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"), help="default: %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 8192, 32768, 16384])
    parser.add_argument("--phases-at", type=int, nargs="*", default=[65536, 8192], help="lengths to take apart")
    parser.add_argument(
        "--memory-at", type=int, nargs="*", default=[131072], help="lengths of which only memory is asked"
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=450, help="stop measuring then; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="8k and 32k, no phases, no 128k")
    parser.add_argument("--commit", help="state of the code, where there is no git checkout")
    parser.add_argument("--skip-check", action="store_true", help="measure without checking first")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal with impl='sdpa'")
    parser.add_argument("--tiny", action="store_true", help="4 heads of 16 instead of 64 of 128, fp32: a rehearsal")
    parser.add_argument("--compile-only", nargs=2, metavar=("KIND", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.lengths, options.phases_at, options.memory_at = [8192, 32768], [], []
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    setting = Setting(device=options.device)
    if options.device == "cpu":  # a rehearsal: graphs are traced, and Inductor, which takes minutes there, left out
        setting = dataclasses.replace(setting, impl="sdpa", backend="aot_eager")
    if options.tiny:
        setting = dataclasses.replace(setting, num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    torch._dynamo.config.recompile_limit = 64  # one function, compiled for every length
    start = time.monotonic()
    recording = Recording(options.out, " ".join((__doc__ or "").split()), commit=options.commit)
    recording.note(setting=setting.to_dict(), argv=list(sys.argv[1:] if argv is None else argv))
    tables = {"whole": WHOLE, "phase": PHASES}
    if options.compile_only:
        kind, length = options.compile_only[0], int(options.compile_only[1])
        makers = {name: make for name, make in tables[kind].items() if name not in _UNCOMPILED}
        Session(setting, recording, options.seconds).race(kind, makers, length, rounds=0)
        return

    jobs = [("whole", length) for length in (*options.lengths, *options.memory_at)]
    jobs += [("phase", length) for length in options.phases_at]
    ahead = CompileAhead(options, jobs, 0.5 * options.seconds)
    if not options.skip_check:
        recording.note(correctness=check(setting))
    recording.note(compiled_ahead=ahead.points())
    print(f"compiled {len(jobs)} jobs by {time.monotonic() - start:.0f} s", flush=True)

    session = Session(setting, recording, options.seconds - (time.monotonic() - start))
    for length in options.lengths:
        session.race("whole", _whole(length), length, options.rounds)
        if length in options.phases_at:
            session.race("phase", PHASES, length, options.rounds)
    for length in options.memory_at:
        session.race("whole", _whole(length), length, rounds=0)
    recording.note(
        slopes={kind: slopes([p for p in recording.points if p["kind"] == kind]) for kind in tables},
        seconds=round(time.monotonic() - start),
    )
    print(json.dumps(recording.content["slopes"], indent=1))
    print(f"{options.out}, after {time.monotonic() - start:.0f} s")


_UNCOMPILED = ("cuDNN SDPA", "flash SDPA", "math SDPA", "score", "fla: selected branch")
_LONGEST_MATH = 8192
"""Longer, the scores of math SDPA alone take more than 30 GiB; its curve is known by then."""


def _whole(length: int) -> dict[str, Maker]:
    return {name: make for name, make in WHOLE.items() if name != "math SDPA" or length <= _LONGEST_MATH}


if __name__ == "__main__":
    main()
