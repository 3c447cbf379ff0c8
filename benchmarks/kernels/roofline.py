"""Compare recorded times of the phases with what an H200 could do: share of its arithmetic, memory and exponentials.

    python -m benchmarks kernels.roofline --phases benchmarks/results/attention_h200.json --json roofline.json

Nothing is measured here. Arithmetic and bytes are counted from the sizes (benchmarks/harness/work.py). The floor of a
pass is the longest of what its products, its bytes as built and its exponentials take at the device's peak.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.work import Work, work_of
from flexnsa import NSAConfig
from flexnsa.attention.footprint import AttentionSizes
from flexnsa.lm.measure.table import format_table

Point = dict[str, Any]


@dataclass(frozen=True)
class Peak:
    """What a device does a second.

    Args:
        flops: dense bf16, nominal.
        bytes: of memory, nominal.
        exps: 16 for each multiprocessor and cycle.
        product: reached by a large product of PyTorch on random numbers.
        copy: bytes read and written by a copy of PyTorch.
    """

    flops: float
    bytes: float
    exps: float
    product: float
    copy: float


H200 = Peak(flops=989e12, bytes=4.8e12, exps=132 * 16 * 1.98e9, product=788e12, copy=4.3e12)


def points(record: dict[str, Any], peak: Peak) -> list[Point]:
    """Join the phases of a recording with their work, one point for each pass that was timed."""
    timed = []
    for phase in (point for point in record["points"] if point["kind"] == "phase"):
        for name, work in work_of(sizes_of(record["setting"], phase["seq_len"])).get(phase["name"], {}).items():
            if f"{name}_ms" in phase:
                key = {"name": phase["name"], "pass": name, "seq_len": phase["seq_len"]}
                timed.append(key | rates(work, phase[f"{name}_ms"], peak))
    return timed


def sizes_of(setting: dict[str, Any], seq_len: int) -> AttentionSizes:
    dim, dtype = setting["head_dim"], getattr(torch, setting["dtype"])
    heads = {"num_heads": setting["num_heads"], "num_kv_heads": setting["num_kv_heads"]}
    config, batch = NSAConfig(**setting["config"]), setting["batch"]
    return AttentionSizes(
        config=config, batch=batch, seq_len=seq_len, **heads, head_dim=dim, v_head_dim=dim, activation=dtype.itemsize
    )


def rates(work: Work, milliseconds: float, peak: Peak) -> Point:
    """Work a second, as shares of the peak, and the time that it would take there."""
    seconds = 1e-3 * milliseconds
    limits = {
        "products": work.flops / peak.flops,
        "memory": work.moved / peak.bytes,
        "exponentials": work.exps / peak.exps,
    }
    bound = max(limits, key=lambda limit: limits[limit])
    return asdict(work) | {
        "moved": work.moved,
        "ms": milliseconds,
        "tflops": work.flops / seconds / 1e12,
        "gbytes_per_s": work.moved / seconds / 1e9,
        "share": {limit: least / seconds for limit, least in limits.items()},
        "bound": bound,
        "floor_ms": 1e3 * limits[bound],
    }


def table(passes: Sequence[Point]) -> str:
    """All passes, the lengths apart."""
    header = ("phase", "pass", "S", "ms", "TFLOP", "TFLOP/s", "of peak", "least GB", "moved GB", "GB/s", "of peak")
    header += ("exps of peak", "floor ms", "reached", "bound by")
    rows = [
        (
            *(str(point[field]) for field in ("name", "pass", "seq_len")),
            f"{point['ms']:.2f}",
            f"{point['flops'] / 1e12:.2f}",
            f"{point['tflops']:.0f}",
            f"{point['share']['products']:.0%}",
            f"{point['least'] / 1e9:.2f}",
            f"{point['moved'] / 1e9:.2f}",
            f"{point['gbytes_per_s']:.0f}",
            f"{point['share']['memory']:.0%}",
            f"{point['share']['exponentials']:.0%}",
            f"{point['floor_ms']:.2f}",
            f"{point['floor_ms'] / point['ms']:.0%}",
            point["bound"],
        )
        for point in sorted(passes, key=lambda point: point["seq_len"])
    ]
    return format_table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, json=options.RESULTS / "roofline_h200.json", device=False)
    recorded = options.RESULTS / "attention_h200.json"
    parser.add_argument("--phases", type=Path, default=recorded, help="a recording with phases; default: %(default)s")
    arguments = parser.parse_args(argv)
    record = json.loads(arguments.phases.read_text())
    passes = points(record, H200)
    recording = options.open_recording(arguments, __doc__)
    recording.content |= {"environment": record["environment"], "setting": record["setting"], "peak": asdict(H200)}
    recording.note(points=passes)
    print(table(passes))
    print(
        f"\npeak: {H200.flops / 1e12:.0f} TFLOP/s, {H200.bytes / 1e12:.1f} TB/s, {H200.exps / 1e12:.1f} T exps/s; "
        f"a product of PyTorch reaches {H200.product / 1e12:.0f} TFLOP/s, a copy {H200.copy / 1e12:.1f} TB/s"
    )


if __name__ == "__main__":
    main()
