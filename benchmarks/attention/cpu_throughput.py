"""Time of attention on a CPU over the length, forward and backward, with flash and math SDPA in one run.

    python -m benchmarks attention.cpu_throughput    # make record does this and more

The attention of the ``large`` preset (12 query and 2 key heads of 64, fp32, eager). All attentions of one length take
turns in one process, so that what slows the machine slows them alike. A ratio is one of medians; above 1, NSA is
faster. Points have the form of those of ``attention.gpu``. Where ``native-sparse-attention-pytorch`` is installed,
its layer is measured, too, up to the length that its memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.growth import crossover
from benchmarks.harness.layers import LAYERS, PEER
from benchmarks.harness.session import Session
from benchmarks.harness.setting import CPU
from benchmarks.harness.workloads import WHOLE
from flexnsa.lm.measure.table import format_table

BASELINES = ("flash SDPA", "math SDPA")
LONGEST_MATH = 4096
LONGEST_LAYER = 2048


def milliseconds(point: dict[str, Any]) -> float | None:
    """Forward and backward; None for a labelled point."""
    return point["forward_ms"] + point["backward_ms"] if "backward_ms" in point else None


def ratios(points: Sequence[dict[str, Any]], baseline: str, ours: str = "NSA") -> dict[int, float]:
    """By length, how many times our time the baseline takes."""
    times = {(point["name"], point["seq_len"]): milliseconds(point) for point in points}
    lengths = sorted({length for _, length in times})
    pairs = {length: (times.get((baseline, length)), times.get((ours, length))) for length in lengths}
    return {length: theirs / own for length, (theirs, own) in pairs.items() if theirs and own}


def table(points: Sequence[dict[str, Any]]) -> str:
    against = {name: ratios(points, name) for name in BASELINES}
    rows = []
    for length in sorted({point["seq_len"] for point in points}):
        times = {point["name"]: milliseconds(point) for point in points if point["seq_len"] == length}
        cells = [f"{times[name]:,.1f}" if times.get(name) else "-" for name in ("NSA", *BASELINES)]
        cells += [f"{against[name][length]:.2f}" if length in against[name] else "-" for name in BASELINES]
        rows.append([f"{length:,}", *cells])
    return format_table(["S", "NSA, ms", *BASELINES, *(f"{name} / NSA" for name in BASELINES)], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(
        __doc__,
        json=options.RESULTS / "cpu_throughput.json",
        device=False,
        seconds=2400,
        lengths=[256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
    )
    parser.add_argument("--rounds", type=int, default=3, help="at the greatest length; up to 15 at others; default: 3")
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=CPU.to_dict())
    session = Session(CPU, recording, arguments.seconds)
    for length in arguments.lengths:
        makers = {name: WHOLE[name] for name in ("NSA", *BASELINES) if name != "math SDPA" or length <= LONGEST_MATH}
        rounds = min(max(15, arguments.rounds), arguments.rounds * max(arguments.lengths) // length)
        session.race("whole", makers, length, rounds)
        if PEER in LAYERS and length <= LONGEST_LAYER:
            session.race("layer", LAYERS, length, rounds)
    print("\n" + table(recording.points) + "\n")
    for length, ratio in ratios(recording.points, PEER, "NSA layer").items():
        print(f"layer, S = {length:,}: {PEER} takes {ratio:.2f} times as long as ours")
    where = crossover(ratios(recording.points, "flash SDPA"))
    print(
        f"NSA is faster than flash SDPA from S = {where:,.0f} on"
        if where
        else "flash SDPA is faster at the greatest length"
    )


if __name__ == "__main__":
    main()
