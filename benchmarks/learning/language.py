"""Bits per byte of real text at 8,192 tokens: NSA and its dense baseline at equal tokens.

    python -m benchmarks learning.language --size m7c-125m --deadline 440   # on two GPUs; on one, start it twice
    python -m benchmarks learning.language --size small --deadline 440      # three seeds, side by side
    python -m benchmarks learning.language --size tiny --device cpu         # a rehearsal, a minute on a core

All learn the Python sources of the machine, the same rows in the same order with the same schedule, and are asked for
bytes of packages that none has seen. ``--models`` takes NSA of other sizes, too, with keys that branches share.
Seconds are those of training alone. ``learning.stages`` compares models after equal seconds, at 32k.

When the time is up every run writes down where it is, and the same command resumes there. What is recorded whole
is not run again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.harness import options
from benchmarks.harness.setting import TINY_SIZES
from benchmarks.learning.language_run import Finals, LanguageRun, final_names
from benchmarks.learning.packages import read_text, standard_roots
from benchmarks.learning.variants import Change
from benchmarks.learning.workers import Job, Report, places, run_jobs
from flexnsa.lm import DecoderConfig, TrainConfig, preset
from flexnsa.lm.measure.table import format_table

Point = dict[str, Any]
KEY = ("size", "model", "seed", "steps", "text_bytes")
"""What tells runs apart; another machine may have other packages."""
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


@dataclass(frozen=True, kw_only=True)
class Model(Change):
    """A model of text."""


def _dense(**config: Any) -> Model:
    return Model(config={"attention": "dense"} | config)


def _nsa(compressor_rate: float = 0.1, **changes: Any) -> Model:
    return Model(compressor_rate=compressor_rate, **changes)


DENSE = "dense"
_FAR: dict[str, Any] = {"rope_base": 1e8}
_SHORT = {"compress_block_size": 8, "compress_stride": 4}
_SMALL_BLOCKS = {"select_block_size": 16, "num_selected_blocks": 64}
_SHARED = {"shared_keys": True, "begun_as_mean": True}
MODELS = {
    DENSE: _dense(),
    "NSA": _nsa(),
    "NSA, plain learning rate": _nsa(1.0),
    "dense, rope 1e8": _dense(**_FAR),
    "NSA, rope 1e8": _nsa(config=_FAR),
    "NSA, l=8 d=4": _nsa(nsa=_SHORT),
    "NSA, l'=16 n=64": _nsa(nsa=_SMALL_BLOCKS),
    "NSA, shared keys, begun as mean": _nsa(**_SHARED),
    "NSA, rope 1e8, shared keys, begun as mean": _nsa(**_SHARED, config=_FAR),
    "NSA, rope 1e8, shared keys, begun as mean, indexer": _nsa(**_SHARED, config=_FAR, indexer=True),
    "NSA, rope 1e8, shared keys, begun as mean, indexer of rank 32": _nsa(
        **_SHARED, config=_FAR | {"index_rank": 32}, indexer=True
    ),
    "NSA, rope 1e8, shared keys, begun as mean, indexer, residual": _nsa(
        **_SHARED, config=_FAR | {"gate": "residual"}, indexer=True
    ),
    "NSA, rope 1e8, shared keys": _nsa(shared_keys=True, config=_FAR),
    "NSA, rope 1e8, begun as mean": _nsa(begun_as_mean=True, config=_FAR),
}
"""NSA learns with compressors at a tenth of the rate of all else, and has the sizes of its preset, but for its name."""

_TRAINING = TrainConfig(
    steps=1000,
    batch_size=8,
    seq_len=8192,
    lr=6e-4,
    warmup_steps=100,
    precision="bf16",
    eval_every=100,
    eval_sequences=32,
    checkpoint_every=500,
)
_TINY = replace(TINY_SIZES, num_local_blocks=1, window_size=16)

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
    changes = {"steps": job["steps"], "seed": job["seed"], "compressor_lr": MODELS[job["model"]].compressor_rate}
    return replace(SIZES[job["size"]].training, **changes)


def state_name(job: Job) -> str:
    """Name the folder of a run's state: the key of the run, so that no run resumes from the state of another."""
    return "-".join(str(job[name]).replace(", ", "-").replace(" ", "-") for name in KEY)


def work(job: Job, report: Report) -> None:
    size, device = SIZES[job["size"]], job["device"]
    folder = Path(job["folder"])
    corpus, _ = read_text([], folder / "text.pt")
    point = {name: job[name] for name in (*KEY, "side_by_side")}
    model, training = MODELS[job["model"]], training_of(job)
    config = model.configure(size.model)
    run = LanguageRun(
        lambda: model.build(config),
        corpus,
        training,
        size.finals,
        device=device,
        folder=folder / state_name(job),
        compiled=job["device"] == "cuda",
    )
    run.resume(job["until"], lambda state: report(point | state))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__, json=options.RESULTS / "language.json", deadline=1e9)
    parser.add_argument("--size", choices=SIZES, help="default: m7c-125m on a GPU, else tiny")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[DENSE, "NSA"], help="default: dense NSA")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the size")
    parser.add_argument("--steps", type=options.positive_int, help="of the whole schedule; default: those of the size")
    parser.add_argument(
        "--side-by-side", type=options.positive_int, help="trainings on one GPU at a time; default: those of the size"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        help="folders of packages, read by the first start; default: those of this Python",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/language"), help="of states; default: %(default)s")
    arguments = parser.parse_args(argv)
    arguments.size = arguments.size or ("m7c-125m" if arguments.device == "cuda" else "tiny")
    size = SIZES[arguments.size]
    arguments.side_by_side = arguments.side_by_side or size.side_by_side
    arguments.steps = arguments.steps or size.training.steps
    arguments.seeds = arguments.seeds or size.seeds
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    until = time.time() + arguments.deadline - TO_SAVE
    recording = options.open_recording(arguments, __doc__, keep=True)
    corpus, packages = read_text(arguments.text or standard_roots(), arguments.folder / "text.pt")
    bytes_of = {"train": len(corpus.train), "held_out": len(corpus.validation)}
    print(f"{bytes_of['train']:,} bytes to learn from, {bytes_of['held_out']:,} kept back", flush=True)
    sizes = {arguments.size, *(point["size"] for point in recording.points)}
    models = {size: {"model": SIZES[size].model.to_dict(), "training": asdict(SIZES[size].training)} for size in sizes}
    setting = {"device": arguments.device, "sizes": models, "models": {name: asdict(MODELS[name]) for name in MODELS}}
    recording.note(setting=setting, text={"bytes": bytes_of} | packages)
    shared = {"device": arguments.device, "folder": arguments.folder.as_posix(), "until": until}
    each = {"side_by_side": arguments.side_by_side} | shared
    jobs = [
        dict(zip(KEY, (arguments.size, model, seed, arguments.steps, bytes_of["train"]), strict=True)) | each
        for seed in arguments.seeds
        for model in arguments.models
    ]
    whole = [_key(point) for point in recording.points if is_whole(point)]
    jobs = [job for job in jobs if _key(job) not in whole]

    def report(point: Point) -> None:
        recorded = {name: value for name, value in point.items() if name not in shared}
        if "label" in point:  # a run that fails keeps what it had
            recorded = next((old for old in recording.points if _key(old) == _key(point)), {}) | recorded
        recording.add(recorded, KEY)
        print(_line(point), flush=True)

    run_jobs(work, jobs, places(arguments.side_by_side, arguments.device), report)
    print(f"\n{table(recording.points)}\n\nRecorded in {arguments.json}.")


def is_whole(point: Point) -> bool:
    """Return whether a run has ended, with all measures of its end."""
    finals = point.get("finals", {})
    config = MODELS[point["model"]].configure(SIZES[point["size"]].model)
    names = final_names(config.attention)
    return all("label" not in finals.get(name, {"label": "not yet"}) for name in names)


def table(points: Sequence[Point]) -> str:
    """Return a line of each run that has ended: held-out bits per byte, and the difference to its dense baseline."""
    ended = {_key(point): point for point in points if "mean" in point.get("finals", {}).get("bits", {})}
    rows = []
    for (size, model, seed, steps, text), point in ended.items():
        bits, baseline = point["finals"]["bits"], ended.get((size, DENSE, seed, steps, text))
        row = [size, model, str(seed), str(steps), f"{bits['mean']:.4f}", f"{point['seconds']:.0f}", "-"]
        if baseline is not None and model != DENSE:
            gaps = [a - b for a, b in zip(bits["groups"], baseline["finals"]["bits"]["groups"], strict=True)]
            row[6] = f"{fmean(gaps):+.4f} +- {stdev(gaps) / len(gaps) ** 0.5:.4f}"
        rows.append(row)
    headings = ["size", "model", "seed", "steps", "bits", "seconds", "- dense, rows' s.e."]
    return format_table(headings, rows)


def _key(point: Point) -> tuple[Any, ...]:
    return tuple(point[name] for name in KEY)


def _line(point: Point) -> str:
    name = f"{point['size']}, {point['model']}, seed {point['seed']}"
    if "label" in point:
        return f"{name}: {point['label']}"
    done = ", ".join(point["finals"])
    step, seconds, bits = point["held_out"][-1]
    return f"{name}: step {step}, {bits:.4f} bits per byte, {seconds:.0f} s{'; ' + done if done else ''}"


if __name__ == "__main__":
    main()
