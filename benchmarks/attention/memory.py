"""Memory of attention in training over the length, and the time of the selected branch alone: how fast each grows.

    python -m benchmarks attention.memory --json benchmarks/results/memory_training.json

Forward and backward at the attention shape of the ``large`` preset (12 query and 2 key heads of 64, fp32 on a CPU), one
process a point. *Saved* is what autograd keeps from forward to backward, *peak* the most the allocator had handed out,
*resident* the same work's peak in the operating system's count, unobserved in another process. All are counted above
what was there before the inputs were made. A point without memory or time is recorded with a label that says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.growth import growth, growth_of, slopes
from benchmarks.harness.layers import LAYERS
from benchmarks.harness.memory import AllocatorProbe, ResidentProbe, saved_for_backward
from benchmarks.harness.phases import PHASES
from benchmarks.harness.setting import CPU, Setting, large
from benchmarks.harness.workloads import WHOLE
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.measure.table import format_table

NAMES = ("NSA", "flash SDPA", "math SDPA", "dense Flex")
MAKERS = WHOLE | PHASES | LAYERS
QUANTITIES = ("saved_mib", "peak_mib", "resident_mib")


def allocated(progress: Callable[[str], object], name: str, length: int, setting: Setting) -> dict[str, float]:
    """One point by the allocator and by autograd, in MiB; without a backward, forward alone."""
    torch.manual_seed(0)
    if setting.device == "cuda" or name == "dense Flex":
        MAKERS[name](setting, length).run()  # compiles, and takes what the libraries keep
    with AllocatorProbe(setting.device) as probe:
        workload = MAKERS[name](setting, length)
        probe.mark("inputs")
        progress("forward")
        with saved_for_backward([]) as saved:
            out = workload.forward()
        saved_bytes = saved.total
        probe.mark("forward")
        progress("backward")
        gradients = workload.backward(out)
        probe.mark("backward")
        del gradients
        progress("summing up")
    most = max(probe.peak["forward"], probe.peak["backward"])
    return {"inputs_mib": probe.at["inputs"] / MIB, "saved_mib": saved_bytes / MIB, "peak_mib": most / MIB}


def resident(progress: Callable[[str], object], name: str, length: int, setting: Setting = CPU) -> dict[str, float]:
    """The peak of the resident set above that before the inputs were made, in MiB."""
    torch.manual_seed(0)
    MAKERS[name](setting, 128).run()  # code and workspaces that any length needs
    probe = ResidentProbe()
    progress("forward and backward")
    MAKERS[name](setting, length).run()
    return {"resident_mib": probe.peak() / MIB}


def selected_branch(
    progress: Callable[[str], object], lengths: Sequence[int], rounds: int, device: str
) -> dict[str, Any]:
    """Seconds of the selected branch alone, forward and backward, all lengths in turn in one process."""
    setting = large(device)
    torch.manual_seed(0)
    branches = {length: PHASES["slc branch"](setting, length).run for length in lengths}
    times = Clock("wall", device).turns(branches, rounds, warm_up=1, progress=progress)
    return {"seconds": {length: statistics.median(column) / 1e3 for length, column in times.items()}}


def _pairs(length: int, setting: Setting) -> int:
    """Count the (query, key) pairs of the selected branch.

    A query sees ``n * l'`` keys only once there are as many. Until then the work itself grows faster than the length.
    """
    size, most = setting.config.select_block_size, setting.config.num_selected_blocks - 1
    return sum(min(t // size, most) * size + t % size + 1 for t in range(length))


def table(points: Sequence[dict[str, Any]]) -> str:
    rows = []
    for point in points:
        cells = [f"{point[quantity]:,.1f}" if quantity in point else "-" for quantity in ("inputs_mib", *QUANTITIES)]
        rows.append([point["name"], f"{point['seq_len']:,}", *cells, point.get("label", "")])
    return format_table(["MiB", "tokens", "inputs", "saved", "peak", "resident peak", ""], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "memory_training.json",
        seconds=300,
        lengths=[1024, 2048, 4096, 8192, 16384],
        rounds=5,
    )
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args(argv)
    setting = large(arguments.device)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict())
    for name in arguments.names:
        for length in arguments.lengths:
            point = {"name": name, "seq_len": length}
            limit = arguments.seconds
            if arguments.device == "cpu" and name == "dense Flex":
                point["label"] = "FlexAttention has no backward on a CPU"
            else:
                point |= run_fresh(allocated, name, length, setting, seconds=limit)
                if arguments.device == "cpu" and "label" not in point:
                    point |= run_fresh(resident, name, length, seconds=limit)
            recording.add(point)
            print(table([point]).splitlines()[-1], flush=True)
    alone = run_fresh(
        selected_branch, arguments.lengths, arguments.rounds, arguments.device, seconds=2 * arguments.seconds
    )
    recording.note(selected_branch_alone=alone)
    print("\n" + table(recording.points) + "\n")
    for name, quantities in growth_of(recording.points, QUANTITIES).items():
        for quantity, values in quantities.items():
            print(f"{name}: {quantity} grows as S^{values['exponent']:.2f}; {values['slopes']}")
    print(f"selected branch alone: {alone}")
    if len(alone.get("seconds", {})) > 1:
        work = slopes({length: _pairs(length, setting) for length in alone["seconds"]})
        print(f"its time grows as {growth(alone['seconds'])}, its (query, key) pairs by slopes of {work}")


if __name__ == "__main__":
    main()
