"""What each branch is for: recall by NSA, by NSA without a branch and by dense attention, on the same rows.

    python -m benchmarks learning.recall --json recall.json --folder runs/recall --deadline 420    # on a GPU
    python -m benchmarks learning.recall --size cpu                                                # an hour on a core

All models learn from the same rows in the same order, with the same learning rate, as many of them side by side as
there are workers. Then they are asked for pairs at 16 depths of rows as long as those they learned from, and longer.
When the time is up every run writes down where it is, and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.learning.curriculum import KINDS, Run
from benchmarks.learning.plan import Plan, Stage
from benchmarks.learning.tasks import Vocabulary
from benchmarks.learning.variants import VARIANTS
from benchmarks.learning.workers import Job, Report, run_jobs
from flexnsa import NSAConfig
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table
from flexnsa.models import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how it is trained."""

    model: DecoderConfig
    plan: Plan


def _model(vocabulary: Vocabulary, **sizes: Any) -> DecoderConfig:
    return DecoderConfig(num_layers=2, vocab_size=vocabulary.size, rope_base=1e6, **sizes)


_MANY = Vocabulary(keys=512, values=128, fillers=128)
_FEW = Vocabulary(keys=64, values=32, fillers=16)

SIZES = {
    "gpu": Size(
        model=_model(
            _MANY,
            dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            nsa=NSAConfig(
                compress_block_size=8,
                compress_stride=4,
                select_block_size=16,
                num_selected_blocks=16,
                num_init_blocks=0,
                num_local_blocks=1,
                window_size=16,
            ),
        ),
        plan=Plan(
            vocabulary=_MANY,
            stages=(
                Stage(seq_len=16, rows=512, pairs=3, steps=300),
                Stage(seq_len=32, rows=256, pairs=4, steps=1400, selected_tokens=16, window_size=4),
                Stage(seq_len=64, rows=128, pairs=8, steps=300, selected_tokens=32, window_size=4),
                Stage(seq_len=128, rows=64, pairs=16, steps=400, selected_tokens=32, window_size=8),
                Stage(seq_len=256, rows=64, pairs=32, steps=600, selected_tokens=64),
                Stage(seq_len=512, rows=32, pairs=64, steps=600, selected_tokens=128),
                Stage(seq_len=1024, rows=16, pairs=128, steps=600, selected_tokens=128),
                Stage(seq_len=2048, rows=16, pairs=256, steps=800),
                Stage(seq_len=4096, rows=8, pairs=256, steps=1400),
            ),
            lr=2e-3,
            plain_up_to=128,
            map_lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
            map_seconds=60.0,
            map_pairs=128,
        ),
    ),
    "cpu": Size(
        model=_model(
            _FEW,
            dim=64,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
            nsa=NSAConfig(
                compress_block_size=8,
                compress_stride=4,
                select_block_size=16,
                num_selected_blocks=4,
                num_init_blocks=0,
                num_local_blocks=1,
                window_size=16,
            ),
        ),
        plan=Plan(
            vocabulary=_FEW,
            stages=(
                Stage(seq_len=16, rows=128, pairs=3, steps=300),
                Stage(seq_len=32, rows=64, pairs=4, steps=300, selected_tokens=16, window_size=4),
                Stage(seq_len=64, rows=32, pairs=8, steps=200, selected_tokens=16, window_size=4),
                Stage(seq_len=128, rows=16, pairs=16, steps=200, selected_tokens=32),
                Stage(seq_len=256, rows=8, pairs=32, steps=300),
            ),
            lr=2e-3,
            plain_up_to=256,
            map_lengths=(128, 256, 512, 1024),
            map_pairs=16,
            map_tokens=2**12,
        ),
    ),
}
SIZES["smoke"] = Size(
    model=SIZES["cpu"].model,
    plan=replace(
        SIZES["cpu"].plan,
        stages=(
            Stage(seq_len=32, rows=4, pairs=3, steps=2, selected_tokens=16, window_size=4),
            Stage(seq_len=64, rows=1, pairs=4, steps=1),
        ),
        eval_every=2,
        plain_up_to=32,
        map_lengths=(64,),
        map_pairs=2,
    ),
)


def work(job: Job, report: Report) -> None:
    """Train one variant with one seed."""
    size = SIZES[job["size"]]
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    point = {name: job[name] for name in ("variant", "seed")}
    path = Path(job["folder"]) / f"{job['variant'].replace(' ', '-')}-{job['seed']}.pt"
    run = Run(VARIANTS[job["variant"]], size.model, size.plan, seed=job["seed"], device=job["device"], path=path)
    if job["rehearsal"]:
        run.rehearse()
        return
    report(point | run.describe())
    run.go_on(job["until"], lambda seen: report(point | seen))


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line of each run: recall of the last maps, means over depths."""
    lengths = sorted({entry["seq_len"] for point in points for entry in point.get("maps", [])})
    rows = []
    for point in points:
        maps = point.get("maps", [])
        last = max((entry["step"] for entry in maps), default=0)
        found = {(e["kind"], e["seq_len"]): fmean(e["recall"]) for e in maps if e["step"] == last}
        cells = [
            f"{found[kind, s]:.1%}" if (kind, s) in found else "-" for kind in ("pairs", "needle") for s in lengths
        ]
        row = [point["variant"], str(point["seed"]), str(point.get("step", point.get("label", "")))]
        rows.append([*row, *cells])
    headings = [f"{kind} {s}" for kind in KINDS for s in lengths]
    return format_table(["model", "seed", "step", *headings], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every variant with every seed, record whatever they report, print."""
    parser = options.parser(__doc__, json=options.RESULTS / "recall.json")
    parser.add_argument("--size", choices=SIZES, help="default: gpu on a GPU, else cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--workers", type=int, help="trainings at a time; default: 15 on a GPU, else 1")
    parser.add_argument("--folder", type=Path, default=Path("runs/recall"), help="of states; default: %(default)s")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which to stop; default: none")
    arguments = parser.parse_args(argv)
    cuda = arguments.device == "cuda"
    size = arguments.size or ("gpu" if cuda else "cpu")
    recording = Recording(arguments.json, options.about(__doc__), keep=True, commit=arguments.commit)
    models = {name: VARIANTS[name].configure(SIZES[size].model).to_dict() for name in arguments.variants}
    setting = {"device": arguments.device, "size": size, "models": models}
    recording.note(setting=setting, plan=asdict(SIZES[size].plan))
    shared = {"size": size, "device": arguments.device, "folder": arguments.folder.as_posix()}
    shared["until"] = time.time() + arguments.deadline
    runs = [(name, seed) for seed in arguments.seeds for name in arguments.variants]
    jobs = [{"variant": name, "seed": seed, "rehearsal": False} | shared for name, seed in runs]
    if cuda:  # compiles, while the others are at rows that need no compiler, what they will then find in its cache
        jobs.insert(0, {"variant": "NSA", "seed": -1, "rehearsal": True} | shared)

    def report(point: dict[str, Any]) -> None:
        hidden = {"rehearsal", *shared}
        recording.add({name: value for name, value in point.items() if name not in hidden}, ("variant", "seed"))
        print(_line(point), flush=True)

    run_jobs(work, jobs, arguments.workers or (15 if cuda else 1), report)
    print(f"\n{table(recording.points)}\n\nRecorded in {arguments.json}.")


def _line(point: dict[str, Any]) -> str:
    name = f"{point['variant']}, seed {point['seed']}"
    if "label" in point:
        return f"{name}: {point['label']}"
    if not point["recall"]:
        return f"{name}: {point['parameters']:,} parameters"
    (step, seq_len, recall), (_, loss) = point["recall"][-1], point["loss"][-1]
    found = f" ({point['found'][-1][2]:.1%} of blocks found)" if point["found"] else ""
    rows = f"{name}: step {step}, rows of {seq_len}"
    return f"{rows}: loss {loss:.3f}, recall {recall:.1%}{found}, {point['seconds']:.0f} s"


if __name__ == "__main__":
    main()
