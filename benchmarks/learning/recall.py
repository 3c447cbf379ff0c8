"""What each branch is for: recall by NSA, by NSA without a branch and by dense attention, on the same rows.

    python -m benchmarks learning.recall --json recall.json --folder runs/recall --deadline 420    # on all GPUs
    python -m benchmarks learning.recall --size ablation --json ablation.json --folder runs/ablation --deadline 420
    python -m benchmarks learning.recall --size cpu                              # some minutes a model on a core

All models learn from the same rows in the same order, with the same learning rate, as many of them side by side as
there are workers. Then they are asked for pairs at 16 depths of rows as long as those they learned from, and longer.
When the time is up every run writes down where it is, and the same command resumes there. Whole runs are recorded,
and none that the file holds is done again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import options
from benchmarks.harness.recording import Recording, encode
from benchmarks.learning.curriculum import Run
from benchmarks.learning.plan import KINDS, Plan
from benchmarks.learning.sizes import SIZES
from benchmarks.learning.workers import Job, Report, places, run_jobs
from flexnsa.lm.measure.table import format_table


def work(job: Job, report: Report) -> None:
    size = SIZES[job["size"]]
    if job["device"] == "cpu":
        torch.set_num_threads(1)
    point = {name: job[name] for name in ("variant", "seed")}
    path = Path(job["folder"]) / f"{job['variant'].replace(' ', '-')}-{job['seed']}.pt"
    settings = {"seed": job["seed"], "device": job["device"], "path": path, "replayed": job["replayed"]}
    run = Run(size.variants[job["variant"]], size.model, size.plan, **settings)
    if job["rehearsal"]:
        run.rehearse()
        return
    report(point | run.describe())
    run.resume(job["until"], lambda state: report(point | state))


def is_whole(point: Mapping[str, Any], plan: Plan) -> bool:
    """Return whether a run has done all its steps and drawn all its maps."""
    drawn = [len(point.get("maps", {}).get(kind, ())) for kind in ("pairs", "needle")]  # earlier runs lack the third
    return point.get("step") == plan.steps and min(drawn) == len(plan.map_lengths)


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what both say, and say differently; one may know of settings that the other does not."""
    names = []
    for name in earlier.keys() & now.keys():
        before, after = earlier[name], now[name]
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += [f"{name}, {inner}" for inner in differences(before, after)]
        elif before != after:
            names.append(name)
    return sorted(names)


def table(points: Sequence[dict[str, Any]], plan: Plan) -> str:
    columns = [(kind, str(seq_len)) for kind in KINDS for seq_len in plan.map_lengths]
    rows = []
    for point in points:
        row = [point["variant"], str(point["seed"]), str(point.get("step", point.get("label", "")))]
        for kind, seq_len in columns:
            counts = point.get("maps", {}).get(kind, {}).get(seq_len)
            row.append(f"{fmean(counts) / plan.map_questions(kind):.1%}" if counts else "-")
        rows.append(row)
    return format_table(["model", "seed", "step", *map(" ".join, columns)], rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options.parser(__doc__, json=options.RESULTS / "recall.json", deadline=1e9)
    parser.add_argument("--size", choices=SIZES, help="default: gpu on a GPU, else cpu")
    known = dict.fromkeys(variant for size in SIZES.values() for variant in size.variants)
    parser.add_argument("--variants", nargs="+", choices=known, help="default: all of the size")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument(
        "--workers", type=options.positive_int, help="trainings at a time, on each GPU; default: 8, else 1"
    )
    parser.add_argument("--replayed", action="store_true", help="capture steps in CUDA graphs; takes a GPU")
    parser.add_argument("--folder", type=Path, default=Path("runs/recall"), help="of states; default: %(default)s")
    arguments = parser.parse_args(argv)
    cuda = arguments.device == "cuda"
    arguments.size = arguments.size or ("gpu" if cuda else "cpu")
    arguments.workers = arguments.workers or (8 if cuda else 1)
    variants = SIZES[arguments.size].variants
    arguments.variants = arguments.variants or list(variants)
    if unknown := [variant for variant in arguments.variants if variant not in variants]:
        expected = f"expected some of {', '.join(variants)} with --size {arguments.size}"
        parser.error(f"--variants: {expected}, got {unknown[0]}")
    return arguments


def note_setting(recording: Recording, arguments: argparse.Namespace) -> None:
    """Note the models and the plan; exit if the file holds runs of others."""
    size = SIZES[arguments.size]
    models = {variant: changes.configure(size.model).to_dict() for variant, changes in size.variants.items()}
    setting = {"device": arguments.device, "size": arguments.size, "models": models}
    notes = json.loads(encode({"setting": setting, "plan": asdict(size.plan)}))  # as it will be read
    if recording.points and (differing := differences(recording.content, notes)):
        reason = f"{arguments.json} holds runs of another setting; it differs in {'; '.join(differing)}"
        options.parser(__doc__).error(f"--json: {reason}")
    recording.note(**notes, looks=size.plan.looks())


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    size, cuda = SIZES[arguments.size], arguments.device == "cuda"
    recording = options.open_recording(arguments, __doc__, keep=True)
    note_setting(recording, arguments)
    whole = {(point["variant"], point["seed"]) for point in recording.points if is_whole(point, size.plan)}
    runs = [(name, seed) for seed in arguments.seeds for name in arguments.variants if (name, seed) not in whole]
    shared = {
        "size": arguments.size,
        "device": arguments.device,
        "replayed": arguments.replayed,
        "folder": arguments.folder.as_posix(),
        "until": time.time() + arguments.deadline,
    }
    jobs = [{"variant": variant, "seed": seed, "rehearsal": False} | shared for variant, seed in runs]
    if cuda and runs:  # compiles, while the others are at rows that need no compiler, what they find in its cache
        sparse = (name for name, _ in runs if size.variants[name].configure(size.model).attention == "nsa")
        jobs.insert(0, {"variant": next(sparse, runs[0][0]), "seed": -1, "rehearsal": True} | shared)

    def report(point: dict[str, Any]) -> None:
        ended, hidden = is_whole(point, size.plan), {"rehearsal", *shared}
        if ended:
            whole.add((point["variant"], point["seed"]))
        if ended or "label" in point:
            recording.add({key: value for key, value in point.items() if key not in hidden}, ("variant", "seed"))
        print(_line(point, size.plan), flush=True)

    run_jobs(work, jobs, places(arguments.workers, arguments.device), report, until=shared["until"])
    stopped = ", ".join(f"{variant} with seed {seed}" for variant, seed in runs if (variant, seed) not in whole)
    print(f"\n{table(recording.points, size.plan)}\n")
    print(f"Recorded in {arguments.json}. Not at their end: {stopped or 'none'}.")


def _line(point: dict[str, Any], plan: Plan) -> str:
    name = f"{point['variant']}, seed {point['seed']}"
    if "label" in point:
        return f"{name}: {point['label']}"
    if not point["recall"]:
        return f"{name}: {point['parameters']:,} parameters"
    (step, seq_len), recall = plan.looks()[len(point["recall"]) - 1], point["recall"][-1]
    selected = f" ({point['found'][-1]:.1%} of blocks found)" if len(point["found"]) == len(point["recall"]) else ""
    rows = f"{name}: step {step}, sequences of {seq_len}"
    return f"{rows}: loss {point['loss'][-1]:.3f}, recall {recall:.1%}{selected}, {point['seconds']:.0f} s"


if __name__ == "__main__":
    main()
