"""Do the work that an earlier NSA system reported figures of, and print both: memory, time, a training step.

    python -m benchmarks earlier_nsa                                # all rows but the longest
    python -m benchmarks earlier_nsa --rows memory long --device cuda --precision bf16 --jobs 4

A row of the file is replaced when it is measured again, so that a run resumes where an earlier one stopped.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.earlier_nsa import rows
from benchmarks.earlier_nsa.rows import ROWS, Row
from benchmarks.harness import options
from benchmarks.harness.fresh import run_fresh
from flexnsa.lm.estimate.training import Precision
from flexnsa.lm.measure.table import format_table

ABOUT = """\
'After forward' is what the allocator has handed out when forward is done: parameters, tokens, and all that autograd
keeps for backward; nothing has been freed, nothing is counted twice. 'Peak' is the most it had handed out at any moment
of forward and backward, gradients included. Both are the allocator's own count (on a CPU: summed from the profiler's
events), the same quantity as the figures of the earlier system. 'Resident' is what the operating system counts for a
second process that does the same work unobserved: it adds the libraries' own buffers."""


def main(argv: Sequence[str] | None = None) -> None:
    groups = list(dict.fromkeys(row.group for row in ROWS.values()))
    parser = options.parser(__doc__, json=Path("runs/earlier_nsa.json"), seconds=600)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=(*groups, *ROWS),
        default=["memory", "time", "train"],
        metavar="ROW",
        help=f"groups ({', '.join(groups)}) or rows ({', '.join(ROWS)}); default: all but long",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of memory rows; bf16 is autocast"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="memory rows measured at once, each in its own process; default: %(default)s",
    )
    arguments = parser.parse_args(argv)
    device, precision = arguments.device, arguments.precision
    recording = options.open_recording(arguments, ABOUT, keep=True)
    recording.note(setting={"device": device})

    def point(row: Row) -> dict[str, Any]:
        where = {"device": device, "precision": precision if row.measures_memory else "fp32"}
        return asdict(row) | where | measure(row, device, where["precision"], arguments.seconds)

    chosen = [row for row in ROWS.values() if row.group in arguments.rows or row.name in arguments.rows]
    timed = [row for row in chosen if not row.measures_memory]
    with ThreadPoolExecutor(max_workers=max(1, arguments.jobs)) as pool:
        measured = as_completed([pool.submit(point, row) for row in chosen if row.measures_memory])
        results = itertools.chain((future.result() for future in measured), map(point, timed))
        for result in results:  # while time is measured, nothing else runs
            recording.add(result, key=("name", "device", "precision"))
    shown = [point for point in recording.points if (point["device"], point["precision"]) == (device, precision)]
    shown.sort(key=lambda point: list(ROWS).index(point["name"]))
    print("\n" + report(shown) + f"\n\n{ABOUT}\n\nRecorded in {arguments.json}.")


def measure(row: Row, device: str, precision: Precision, seconds: float) -> dict[str, Any]:
    """Return the figures of a row, or a label that says why there are none."""
    start = time.monotonic()

    def report_stage(stage: str) -> None:
        print(f"{row.name:16} {time.monotonic() - start:5.0f} s  {stage}", file=sys.stderr, flush=True)

    limits: Any = {"seconds": seconds, "limit_memory": device == "cpu", "report": report_stage}
    if row.group == "time":
        return run_fresh(rows.measure_time, row, device, **limits)
    if row.group == "train":
        return run_fresh(rows.measure_training, row, device, **limits)
    figures = run_fresh(rows.measure_memory, row, device, precision, **limits)
    if device == "cpu":
        figures |= run_fresh(rows.measure_resident, row, precision, **limits)
    return figures | rows.estimate(row, device, precision)


def report(points: Sequence[dict[str, Any]]) -> str:
    """Two tables: memory in MiB, and time."""
    memory = [_memory_line(point) for point in points if ROWS[point["name"]].measures_memory]
    timed = [_time_line(point) for point in points if not ROWS[point["name"]].measures_memory]
    tables = []
    if memory:
        header = ["MiB", "theirs, after forward", "ours", "theirs / ours", "estimate", "off by"]
        header += ["our peak", "estimate", "off by", "resident: after forward", "peak"]
        tables.append(format_table(header, memory))
    if timed:
        header = ["seconds", "theirs", "ours", "theirs / ours", "tokens/s", "first loss - ln 256", "remark"]
        tables.append(format_table(header, timed))
    return "\n\n".join(tables)


def _memory_line(point: dict[str, Any]) -> list[str]:
    theirs, ours = point.get("theirs"), point.get("after_forward")
    precision = "" if point["precision"] == "fp32" else f", {point['precision']}"
    line = [f"{point['preset']}, {point['layers']} layers, S={point['seq_len']}{precision}", _number(theirs)]
    if ours is None:
        return [*line, point.get("label", "-"), *["-"] * 2, *["-"] * 6]
    return [
        *line,
        _number(ours),
        _number(theirs and theirs / ours, ".1f"),
        _number(point["estimated_after_forward"]),
        _number(point["estimated_after_forward"] / ours - 1, "+.1%"),
        _number(point["peak"]),
        _number(point["estimated_peak"]),
        _number(point["estimated_peak"] / point["peak"] - 1, "+.1%"),
        _number(point.get("resident_after_forward")),
        _number(point.get("resident_peak")),
    ]


def _time_line(point: dict[str, Any]) -> list[str]:
    work = "one training step" if point["group"] == "train" else "forward and backward"
    line = [f"{point['preset']}, {point['layers']} layers, B={point['batch']}, S={point['seq_len']}, {work}"]
    seconds, loss = point.get("seconds"), point.get("first_loss")
    if seconds is None:
        return [*line, _number(point["theirs"], ",.2f"), point.get("label", "-"), *["-"] * 3, point["remark"]]
    return [
        *line,
        _number(point["theirs"], ",.2f"),
        _number(seconds, ",.2f"),
        _number(point["theirs"] / seconds, ".1f"),
        _number(point["batch"] * point["seq_len"] / seconds),
        _number(loss and loss - math.log(256), "+.3f"),
        point["remark"],
    ]


def _number(value: float | None, spec: str = ",.0f") -> str:
    return "-" if value is None else format(value, spec)


if __name__ == "__main__":
    main()
