"""Bits per byte of real text at 8,192 tokens: NSA and its dense twin at equal tokens and at equal time.

    python -m benchmarks learning.language --size m7c-125m --deadline 440   # on two GPUs; on one, start it twice
    python -m benchmarks learning.language --size small --deadline 440      # three seeds, side by side
    python -m benchmarks learning.language --size tiny --device cpu         # a rehearsal, a minute on a core

Both learn the Python sources of the machine, the same rows in the same order with the same schedule, and are asked for
bytes of packages that neither has seen. Losses at equal tokens are those after the last step. For equal time the
slower one's loss is read off where the faster one ended, between its looks at held-out rows: its learning rate has not
come all the way down there. Seconds are those of training alone, where no other training is on the GPU.

When the time is up every run writes down where it is, and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import options
from benchmarks.learning.language_run import Finals, LanguageRun
from benchmarks.learning.packages import read_text, standard_roots
from benchmarks.learning.workers import Job, Report, places, run_jobs
from flexnsa import NSAConfig
from flexnsa.measure.recording import Recording
from flexnsa.measure.table import format_table
from flexnsa.models import DecoderConfig, preset
from flexnsa.training import TrainConfig

Point = dict[str, Any]
MODELS = ("nsa", "dense")
KEY = ("size", "model", "seed", "steps")
"""What tells runs apart."""
TO_SAVE = 12.0
"""Seconds of the deadline that are kept to write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, how it is trained, and how many trainings share a GPU."""

    model: DecoderConfig
    training: TrainConfig
    finals: Finals = field(default_factory=Finals)
    seeds: tuple[int, ...] = (0,)
    side_by_side: int = 1


_TRAINING = TrainConfig(
    steps=1600,
    batch_size=8,
    seq_len=8192,
    lr=6e-4,
    warmup_steps=100,
    precision="bf16",
    eval_every=100,
    eval_sequences=32,
    checkpoint_every=500,
)
_TINY = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    num_local_blocks=1,
    window_size=16,
)

SIZES = {
    "m7c-125m": Size(model=preset("m7c-125m", checkpointing=False), training=_TRAINING),
    "small": Size(
        model=DecoderConfig(dim=384, num_layers=6, num_heads=6, num_kv_heads=1, head_dim=64),
        training=replace(_TRAINING, steps=800, lr=1e-3, checkpoint_every=400),
        seeds=(0, 1, 2),
        side_by_side=3,
    ),
    "tiny": Size(
        model=DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=_TINY),
        training=TrainConfig(
            steps=6, batch_size=2, seq_len=256, warmup_steps=2, eval_every=2, eval_sequences=4, checkpoint_every=4
        ),
        finals=Finals(rows=6, rows_of_choices=4, rows_of_habits=2),
    ),
}


def training_of(job: Job) -> TrainConfig:
    """Give how a job trains."""
    training = SIZES[job["size"]].training
    return replace(training, steps=job["steps"], seed=job["seed"])


def work(job: Job, report: Report) -> None:
    """Train one model with one seed."""
    size, device = SIZES[job["size"]], job["device"]
    folder = Path(job["folder"])
    corpus, _ = read_text([], folder / "text.pt")
    point = {name: job[name] for name in (*KEY, "side_by_side")}
    run = LanguageRun(
        replace(size.model, attention=job["model"]),
        corpus,
        training_of(job),
        size.finals,
        device=device,
        folder=folder / f"{job['size']}-{job['model']}-{job['seed']}",
        compiled=job["device"] == "cuda",
    )
    run.go_on(job["until"], lambda seen: report(point | seen))


def main(argv: Sequence[str] | None = None) -> None:
    """Train each model with every seed, record whatever they report, print how they compare."""
    parser = options.parser(__doc__, json=options.RESULTS / "language.json")
    parser.add_argument("--size", choices=SIZES, help="default: m7c-125m on a GPU, else tiny")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--steps", type=int, help="of the whole schedule; default: those of the size")
    parser.add_argument("--side-by-side", type=int, help="trainings on one GPU at a time; default: those of the size")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="folders of packages, read by the first start; default: those of this Python",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/language"), help="of states; default: %(default)s")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which to stop; default: none")
    arguments = parser.parse_args(argv)
    until = time.time() + arguments.deadline - TO_SAVE
    cuda = arguments.device == "cuda"
    name = arguments.size or ("m7c-125m" if cuda else "tiny")
    size = SIZES[name]
    recording = Recording(arguments.json, options.about(__doc__), keep=True, commit=arguments.commit)
    corpus, packages = read_text(arguments.text or standard_roots(), arguments.folder / "text.pt")
    bytes_of = {"train": len(corpus.train), "held_out": len(corpus.validation)}
    print(f"{bytes_of['train']:,} bytes to learn from, {bytes_of['held_out']:,} kept back", flush=True)
    each = arguments.side_by_side or size.side_by_side
    sizes = {name, *(point["size"] for point in recording.points)}
    models = {size: {"model": SIZES[size].model.to_dict(), "training": asdict(SIZES[size].training)} for size in sizes}
    recording.note(setting={"device": arguments.device, "sizes": models}, text={"bytes": bytes_of} | packages)
    shared = {"device": arguments.device, "folder": arguments.folder.as_posix(), "until": until}
    steps = arguments.steps or size.training.steps
    jobs = [
        {"size": name, "model": model, "seed": seed, "steps": steps, "side_by_side": each} | shared
        for seed in arguments.seeds or size.seeds
        for model in arguments.models
    ]

    def report(point: Point) -> None:
        kept, key = {name: value for name, value in point.items() if name not in shared}, itemgetter(*KEY)
        earlier = next((old for old in recording.points if key(old) == key(point)), {})
        recording.add(earlier | kept, KEY)  # a run that fails keeps what it had
        print(_line(point), flush=True)

    run_jobs(work, jobs, places(each, arguments.device), report)
    print(f"\n{table(recording.points)}\n\nRecorded in {arguments.json}.")


def table(points: Sequence[Point]) -> str:
    """A line of each pair of models: held-out bits per byte after as many tokens, and after as many seconds."""
    rows = []
    for nsa, dense in pairs(points):
        gaps = [a - b for a, b in zip(nsa["finals"]["bits"]["rows"], dense["finals"]["bits"]["rows"], strict=True)]
        at, first, second = equal_time(nsa, dense)
        row = [nsa["size"], str(nsa["seed"]), str(nsa["step"])]
        row += [f"{point['finals']['bits']['mean']:.4f}" for point in (nsa, dense)]
        row.append(f"{fmean(gaps):+.4f} +- {stdev(gaps) / len(gaps) ** 0.5:.4f}")
        row.append(f"{nsa['seconds']:.0f}, {dense['seconds']:.0f}")
        row.append(f"{first - second:+.4f} at {at:.0f} s" if nsa["side_by_side"] == 1 else "-")
        rows.append(row)
    headings = ["size", "seed", "steps", "NSA", "dense", "NSA - dense, rows' s.e.", "seconds", "at equal time"]
    return format_table(headings, rows)


def pairs(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Give the runs of NSA and of its twin that have ended after the same steps with the same seed."""
    ended = {
        tuple(point[name] for name in ("size", "seed", "steps", "model")): point
        for point in points
        if "bits" in point.get("finals", {})
    }
    found = [(point, ended.get((*key[:-1], "dense"))) for key, point in ended.items() if key[-1] == "nsa"]
    return [(nsa, dense) for nsa, dense in found if dense is not None]


def equal_time(nsa: Point, dense: Point) -> tuple[float, float, float]:
    """Give the seconds after which the faster one ended, and both losses then, of the rows of a look."""
    at = min(nsa["held_out"][-1][1], dense["held_out"][-1][1])
    return at, _loss_at(nsa, at), _loss_at(dense, at)


def _loss_at(point: Point, seconds: float) -> float:
    """Read a loss off between two looks."""
    looks = point["held_out"]
    for (_, early, before), (_, late, after) in pairwise(looks):
        if early <= seconds <= late and early < late:
            return before + (after - before) * (seconds - early) / (late - early)
    return looks[-1][2]


def _line(point: Point) -> str:
    name = f"{point['size']}, {point['model']}, seed {point['seed']}"
    if "label" in point:
        return f"{name}: {point['label']}"
    done = ", ".join(point["finals"])
    step, seconds, bits = point["held_out"][-1]
    return f"{name}: step {step}, {bits:.4f} bits per byte, {seconds:.0f} s{'; ' + done if done else ''}"


if __name__ == "__main__":
    main()
