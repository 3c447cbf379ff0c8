"""What a score_mod or mask_mod costs: NSA with and without, forward and backward, in turn, in one process.

    python -m benchmarks attention.mods --json benchmarks/results/mods_h200.json              # on a GPU
    python -m benchmarks attention.mods --device cpu --lengths 2048 --rounds 3                # on a CPU

Each branch is compiled by itself, as it is wherever the caller compiles nothing. Peak memory is the allocator's, above
the inputs, on a GPU only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import options
from benchmarks.harness.session import Session
from benchmarks.harness.setting import CPU, Setting
from benchmarks.harness.workloads import Maker, Workload, nsa
from flexnsa import mods
from flexnsa.lm.measure.table import format_table


def variants(setting: Setting) -> dict[str, Maker]:
    """Name attention with each mod."""
    slopes = mods.alibi_slopes(setting.num_heads, setting.device)
    capped = mods.soft_cap(30.0)
    arguments: dict[str, dict[str, Any]] = {
        "no mod": {},
        "soft_cap": {"score_mod": capped},
        "alibi": {"score_mod": mods.alibi(slopes)},
        "prefix_lm": {"mask_mod": mods.prefix_lm(128, 1024)},
        "soft_cap, alibi and prefix_lm": {
            "score_mod": mods.chain(capped, mods.alibi(slopes)),
            "mask_mod": mods.prefix_lm(128, 1024),
        },
    }

    def maker(name: str) -> Maker:
        def make(setting: Setting, length: int) -> Workload:
            return dataclasses.replace(nsa(setting, length, **arguments[name]), name=name)

        return make

    return {name: maker(name) for name in arguments}


def table(points: Sequence[dict[str, Any]]) -> str:
    """Milliseconds and MiB, and the ratio to the same length without a mod."""
    plain = {p["seq_len"]: p.get("forward_ms", 0) + p.get("backward_ms", 0) for p in points if p["name"] == "no mod"}
    rows = []
    for p in points:
        if "forward_ms" not in p:
            rows.append([f"{p['seq_len']:,}", p["name"], str(p.get("label", "not measured")), "", "", ""])
            continue
        ratio = (p["forward_ms"] + p["backward_ms"]) / plain[p["seq_len"]] if plain.get(p["seq_len"]) else float("nan")
        peak = f"{p['peak_mib']:,.0f}" if "peak_mib" in p else "-"
        times = (f"{p['forward_ms']:.1f}", f"{p['backward_ms']:.1f}", f"{ratio:.2f}")
        rows.append([f"{p['seq_len']:,}", p["name"], *times, peak])
    return format_table(["tokens", "mod", "forward, ms", "backward, ms", "of no mod", "peak, MiB"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, seconds=300, lengths=[8192, 32768], rounds=5)
    arguments = parser.parse_args(argv)
    setting = dataclasses.replace(Setting(), backend=None, impl="auto") if arguments.device == "cuda" else CPU
    recording = options.open_recording(arguments, __doc__)
    recording.note(setting=setting.to_dict())
    session = Session(setting, recording, arguments.seconds)
    for length in arguments.lengths:
        session.race("mods", variants(setting), length, arguments.rounds)
    recording.save()
    print(table(recording.points))


if __name__ == "__main__":
    main()
