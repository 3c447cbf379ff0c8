"""Memory of attention in training over the length, and the time of the selected branch alone: how fast each grows.

    python -m benchmarks.attention.memory --out benchmarks/results/memory_training.json

Forward and backward at the attention shape of the ``large`` preset (12 query and 2 key heads of 64, fp32 on a CPU), one
process a point. *Saved* is what autograd keeps from forward to backward, *peak* the most the allocator had handed out,
*resident* the same work's peak in the operating system's count, unobserved in another process. All are counted above
what was there before the inputs were made. A point without memory or time is recorded with a label that says so.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.contestants import CPU, PHASES, WHOLE, Contestant, Setting
from benchmarks.harness.layers import LAYERS
from flexnsa.measure.memory import MIB, AllocatorProbe, ResidentProbe, saved_for_backward
from flexnsa.measure.process import run_fresh
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table

CUDA = Setting(num_heads=12, num_kv_heads=2, head_dim=64)
NAMES = ("NSA", "flash SDPA", "math SDPA", "dense Flex")
MAKERS = WHOLE | PHASES | LAYERS
QUANTITIES = ("saved_mib", "peak_mib", "resident_mib")


def allocated(progress: Callable[[str], object], name: str, length: int, setting: Setting) -> dict[str, float]:
    """One point by the allocator and by autograd, in MiB; without a backward, forward alone."""
    torch.manual_seed(0)
    if setting.device == "cuda" or name == "dense Flex":
        _run(MAKERS[name](setting, length))  # compiles, and takes what the libraries keep
    with AllocatorProbe(setting.device) as probe:
        contestant = MAKERS[name](setting, length)
        probe.mark("inputs")
        progress("forward")
        with saved_for_backward([]) as saved:
            out = contestant.function(*contestant.inputs)
        saved_bytes = saved.total
        probe.mark("forward")
        progress("backward")
        gradients = _backward(contestant, out)
        probe.mark("backward")
        del gradients
        progress("summing up")
    most = max(probe.peak["forward"], probe.peak["backward"])
    return {"inputs_mib": probe.at["inputs"] / MIB, "saved_mib": saved_bytes / MIB, "peak_mib": most / MIB}


def resident(progress: Callable[[str], object], name: str, length: int, setting: Setting = CPU) -> dict[str, float]:
    """The peak of the resident set above that before the inputs were made, in MiB."""
    torch.manual_seed(0)
    _run(MAKERS[name](setting, 128))  # code and workspaces that any length needs
    probe = ResidentProbe()
    progress("forward and backward")
    _run(MAKERS[name](setting, length))
    return {"resident_mib": probe.peak() / MIB}


def selected_branch(
    progress: Callable[[str], object], lengths: Sequence[int], rounds: int, device: str
) -> dict[str, Any]:
    """Seconds of the selected branch alone, forward and backward, all lengths in turn in one process.

    A query sees ``n * l'`` keys only once there are as many. Until then the work itself grows faster than the length;
    ``pairs`` counts it.
    """
    setting = CPU if device == "cpu" else CUDA
    torch.manual_seed(0)
    contestants = {length: PHASES["slc branch"](setting, length) for length in lengths}
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for number in range(rounds + 1):  # the first warms up
        for length, contestant in contestants.items():
            progress(f"round {number} of {rounds}, S={length}")
            start = time.perf_counter()
            _run(contestant)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[length].append(time.perf_counter() - start)
    return {
        "seconds": {length: statistics.median(column[1:]) for length, column in seconds.items()},
        "all_seconds": {length: column[1:] for length, column in seconds.items()},
        "pairs": {length: _pairs(length, setting) for length in lengths},
    }


def _pairs(length: int, setting: Setting) -> int:
    """Count the (query, key) pairs of the selected branch."""
    size, most = setting.config.select_block_size, setting.config.num_selected_blocks - 1
    return sum(min(t // size, most) * size + t % size + 1 for t in range(length))


def local_slopes(curve: dict[int, float]) -> dict[str, float]:
    """``log2(y(2S) / y(S))`` between neighbouring lengths."""
    lengths = sorted(curve)
    return {f"{a}-{b}": round(log2(curve[b] / curve[a]) / log2(b / a), 3) for a, b in itertools.pairwise(lengths)}


def fit(curve: dict[int, float]) -> dict[str, float]:
    """Least-squares exponent of a power law, and the largest relative residual of a point."""
    x, y = [log2(length) for length in curve], [log2(value) for value in curve.values()]
    x_mean, y_mean = statistics.fmean(x), statistics.fmean(y)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)
    residuals = [2 ** abs(b - y_mean - slope * (a - x_mean)) - 1 for a, b in zip(x, y, strict=True)]
    return {"exponent": round(slope, 3), "largest_residual": round(max(residuals), 4)}


def growth(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Slopes and fits of every quantity of every attention."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(point["name"] for point in points):
        for quantity in QUANTITIES:
            curve = {p["seq_len"]: p[quantity] for p in points if p["name"] == name and p.get(quantity)}
            if len(curve) > 1:
                found.setdefault(name, {})[quantity] = {"slopes": local_slopes(curve), **fit(curve)}
    return found


def table(points: Sequence[dict[str, Any]]) -> str:
    """Lines of lengths, and the slopes beside."""
    rows = []
    for point in points:
        cells = [f"{point[quantity]:,.1f}" if quantity in point else "-" for quantity in ("inputs_mib", *QUANTITIES)]
        rows.append([point["name"], f"{point['seq_len']:,}", *cells, point.get("label", "")])
    return format_table(["MiB", "tokens", "inputs", "saved", "peak", "resident peak", ""], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, record after every point, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory_training.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=5, help="of the timing; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one point; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or every process announces its profiler
    setting = CPU if options.device == "cpu" else CUDA
    recording = Recording(options.out, " ".join((__doc__ or "").split()))
    recording.note(setting=setting.to_dict())
    for name in options.names:
        for length in options.lengths:
            point = {"name": name, "seq_len": length}
            limit = options.seconds
            if options.device == "cpu" and name == "dense Flex":
                point["label"] = "FlexAttention has no backward on a CPU"
            else:
                point |= run_fresh(allocated, name, length, setting, seconds=limit)
                if options.device == "cpu" and "label" not in point:
                    point |= run_fresh(resident, name, length, seconds=limit)
            recording.add(point)
            print(table([point]).splitlines()[-1], flush=True)
    alone = run_fresh(selected_branch, options.lengths, options.rounds, options.device, seconds=2 * options.seconds)
    if "seconds" in alone:
        alone |= {"slopes": local_slopes(alone["seconds"]), **fit(alone["seconds"])}
        alone["slopes_of_pairs"] = local_slopes(alone["pairs"])
    recording.note(selected_branch_alone=alone, growth=growth(recording.points))
    print("\n" + table(recording.points) + "\n")
    for name, quantities in recording.content["growth"].items():
        for quantity, values in quantities.items():
            print(f"{name}: {quantity} grows as S^{values['exponent']:.2f}; {values['slopes']}")
    print(f"selected branch alone, seconds: {alone}")


def _run(contestant: Contestant) -> None:
    _backward(contestant, contestant.function(*contestant.inputs))


def _backward(contestant: Contestant, out: Any) -> tuple[torch.Tensor, ...]:
    if not contestant.differentiate:
        return ()
    return torch.autograd.grad(out, contestant.differentiate, torch.ones_like(out))


if __name__ == "__main__":
    main()
