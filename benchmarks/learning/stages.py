"""Bits per byte at 32k or 8k after equal seconds: NSA and dense attention, each at its best, with growing sequences.

    python -m benchmarks learning.stages --job nsa:1.2e-3:0 --job dense:1.2e-3:0    # a GPU for each job, side by side
    python -m benchmarks learning.stages --table                                    # of what is recorded
    python -m benchmarks learning.stages --ends 8192 --job ...                      # the same, without the last stage

A job is a model, a learning rate and a seed. Each trains for the same seconds, which leave out evaluations and the
first step of each length, which compiles. On a GPU a CUDA graph replays the steps. The learning rate follows the
seconds: constant after 100 steps, and down to a twentieth in the last 30 %. The text to learn from and the text kept
back are of different distributions, and files kept back that the training text nearly has are left out. Models of a
seed start with the same weights, as far as both have them. Learning rates are chosen on one half of the files kept back
(``choose``), results are of the other (``report``).
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness import options
from benchmarks.learning.packages import (
    halves,
    joined,
    read_packages,
    split_packages,
    standard_roots,
    without_known_files,
)
from benchmarks.learning.reading import bits_of_bytes
from benchmarks.learning.workers import Job, Point, Report, places, run_jobs
from flexnsa import SelectionLoss
from flexnsa.lm import Batch, DecoderConfig, DecoderLM, preset
from flexnsa.lm.measure.table import format_table
from flexnsa.operators.graphs import Graphed
from flexnsa.optim import index_parameters, parameter_groups

STAGES = ((2048, 0.15), (8192, 0.35), (32768, 0.5))
"""Tokens of a sequence, and share of the seconds."""
TOKENS = 65536
"""Of a step."""
EDGES = (0, 512, 1024, 2048, 4096, 8192, 16384, 24576, 32768)
"""Tokens of a sequence between which the loss by position is averaged."""
KEY = ("model", "lr", "seed", "seconds")
AT_ONCE = 8
"""Steps between which nothing waits for the device, as in training."""
WIDE = 16
"""Layers of a dense model with about as many parameters as NSA with 12."""
ROWS = {"32k": (32768, 64), "8k": (8192, 128)}
"""Tokens and number of the sequences on which results are measured."""


class Variant(NamedTuple):
    """What differs from the default preset: branches of a dense stage, how many stages it takes, settings."""

    branches: tuple[str, ...] | None = None
    stages: int = 0
    share_index: int = 1
    num_selected_blocks: int = 16
    taught_densely: bool = True
    """Whether indexers learn in a dense stage."""
    first_rate: float = 1.0
    """Learning rate of the first stage, in learning rates of the job."""
    cut: float = 0.0
    """Share of the seconds after which the stage that is running is cut in two; 0 for none."""


NSA = {
    "nsa": Variant(),
    "nsa, dense first": Variant(("slc",), 1),
    "nsa, all branches dense first": Variant(("cmp", "slc", "win"), 1),
    "nsa, dense to 8k": Variant(("slc",), 2),
    "nsa, dense first, shared index 3": Variant(("slc",), 1, 3),
    "nsa, dense first, shared index 6": Variant(("slc",), 1, 6),
    "nsa, dense first, 32 blocks": Variant(("slc",), 1, num_selected_blocks=32),
    "nsa, dense first, then indexers": Variant(("slc",), 1, taught_densely=False),
    "nsa, dense first, then indexers, 8 blocks": Variant(("slc",), 1, num_selected_blocks=8, taught_densely=False),
    "nsa, dense until 0.6, then indexers": Variant(("slc",), 2, taught_densely=False, cut=0.6),
    "nsa, dense until 0.8, then indexers": Variant(("slc",), 2, taught_densely=False, cut=0.8),
    "nsa, dense first 1.5, then indexers": Variant(("slc",), 1, taught_densely=False, first_rate=1.5),
    "nsa, dense first 1.5, then indexers, 8 blocks": Variant(
        ("slc",), 1, num_selected_blocks=8, taught_densely=False, first_rate=1.5
    ),
}
DENSE = {"dense": Variant(), "dense, first 1.5": Variant(first_rate=1.5), "dense wide": Variant()}
VARIANTS = NSA | DENSE


def stages_until(ends: int) -> tuple[tuple[int, float], ...]:
    """Return the stages up to a length, with shares of the same proportion."""
    stages = [(length, share) for length, share in STAGES if length <= ends]
    total = sum(share for _, share in stages)
    return tuple((length, round(share / total, 4)) for length, share in stages)


def cut_at(stages: Sequence[tuple[int, float]], cut: float) -> list[tuple[int, float]]:
    """Cut in two the stage that runs after a share of the seconds."""
    parts, begin = list[tuple[int, float]](), 0.0
    for length, share in stages:
        first = cut - begin
        parts += [(length, first), (length, share - first)] if 0 < first < share else [(length, share)]
        begin += share
    return parts


def config_of(name: str, *, tiny: bool) -> DecoderConfig:
    """Return a model: NSA, the default preset; ``dense``, of the same layers; ``dense wide``, of more."""
    config = preset("text-125m", checkpointing=False)
    if tiny:
        config = replace(config, dim=64, num_layers=2, num_heads=6, num_kv_heads=1, head_dim=8)
    if name in NSA:
        by = NSA[name]
        nsa = replace(config.nsa, num_selected_blocks=by.num_selected_blocks)
        return replace(config, share_index=by.share_index, nsa=nsa)
    layers = config.num_layers * (WIDE if name == "dense wide" else 12) // 12
    return replace(config, attention="dense", num_layers=layers)


def model_of(name: str, seed: int, *, tiny: bool) -> DecoderLM:
    """Build a model, which starts with the weights of all models of its seed where a dense one has them too."""
    config = config_of(name, tiny=tiny)
    torch.manual_seed(seed)
    starts = DecoderLM(replace(config, attention="dense")).state_dict()
    starts |= {key.replace("w_k.", "w_k_slc.").replace("w_v.", "w_v_slc."): x for key, x in starts.items()}
    model = DecoderLM(config)
    model.load_state_dict(starts, strict=False)
    return model


def read_text(cache: Path, *, tiny: bool) -> dict[str, Any]:
    """Return the texts ``train``, ``choose`` and ``report``, uint8 ``(bytes,)``, and the ``sizes`` of their parts."""
    if not cache.exists():
        packages = read_packages(standard_roots()[:1] if tiny else standard_roots())
        train, held_out = split_packages(packages) if len(packages) > 1 else (packages, packages)
        new = held_out if tiny else without_known_files(train, held_out)
        parts = dict(zip(("choose", "report"), halves(new), strict=True)) | {"train": train}
        sizes = {part: {package.name: package.size for package in of} for part, of in parts.items()}
        sizes["held out before"] = {package.name: package.size for package in held_out}
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save({part: joined(of) for part, of in parts.items()} | {"sizes": sizes}, cache)
    return torch.load(cache)


def rows_of(text: Tensor, starts: Sequence[int], length: int) -> Batch:
    """Return sequences that begin at these bytes."""
    windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return Batch(windows[:, :-1], windows[:, 1:])


def spread(text: Tensor, length: int, count: int) -> Batch:
    """Return evenly spread sequences."""
    last = len(text) - length - 1
    return rows_of(text, [round(index * last / max(1, count - 1)) for index in range(count)], length)


def drawn(text: Tensor, length: int, count: int, seed: int, step: int) -> Batch:
    """Draw the sequences of a step: the same for all models."""
    generator = random.Random(f"{seed}/{step}/{length}")
    return rows_of(text, [generator.randrange(len(text) - length) for _ in range(count)], length)


class StagedRun:
    """A model that trains through the stages; its losses are bits per byte."""

    def __init__(self, job: Job, report: Report) -> None:
        self.job, self.report, self.device = job, report, torch.device(job["device"])
        self.variant = VARIANTS[job["model"]]
        tiny, cuda = job["tiny"], self.device.type == "cuda"
        stages = cut_at(job.get("stages", STAGES), self.variant.cut)
        self.stages = [(length // (128 if tiny else 1), share) for length, share in stages]
        self.tokens = TOKENS // (128 if tiny else 1)
        self.text = read_text(Path(job["text"]), tiny=tiny)
        self.model = model_of(job["model"], job["seed"], tiny=tiny).to(self.device)
        self.reader = copy.deepcopy(self.model).eval()  # not compiled: it reads other lengths
        self.reader.load_state_dict(self.model.state_dict(), assign=True)
        if cuda:
            self.model.compile_layers()
        groups = parameter_groups(self.model, lr=1.0, weight_decay=0.1)
        self.rates = [float(group["lr"]) for group in groups]
        for group in groups:
            group["lr"] = torch.zeros((), device=self.device)  # a graph reads it
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, capturable=cuda)
        taught = {id(parameter) for parameter in index_parameters(self.model)}
        parts = ([p for p in self.model.parameters() if (id(p) in taught) == of_index] for of_index in (False, True))
        self.clipped = [part for part in parts if part]  # an indexer learns from a loss of its own
        self.precision = torch.autocast(self.device.type, torch.bfloat16, enabled=cuda)
        self.seconds, self.step, self.counts = 0.0, 0, [0] * len(self.stages)
        self.seen: dict[str, Any] = {"first_step_s": [], "looks": [], "loss": []}
        self.losses: list[Tensor] = []
        self.learn: Callable[..., Tensor]
        """Takes a step of the present stage, of its number, tokens and targets; returns its loss."""

    def train(self, until: float) -> None:
        """Train for the seconds of the job, or until ``time.time()``; look at held-out rows on the way."""
        total, next_look = float(self.job["seconds"]), 0.0
        while self.seconds < total and time.time() < until:
            if self.seconds >= next_look:
                self.look()
                next_look += total / 10
            first = self.is_first(self.seconds / total)
            start = time.perf_counter()
            for _ in range(1 if first or self.job["tiny"] else AT_ONCE):
                self.train_step(self.seconds / total)
            self.losses[-1].item()  # waits for the device
            took = time.perf_counter() - start
            if first:
                self.seen["first_step_s"].append(round(took, 2))
            else:
                self.seconds += took
        self.look()

    def stage_at(self, share: float) -> int:
        """Return the stage after a share of the seconds."""
        ends = accumulate(part for _, part in self.stages)
        return next((index for index, end in enumerate(ends) if share < end), len(self.stages) - 1)

    def is_first(self, share: float) -> bool:
        """Whether no step of this stage has been taken."""
        return self.counts[self.stage_at(share)] == 0

    def train_step(self, share: float) -> None:
        """Take one step, after a share of the seconds."""
        stage = self.stage_at(share)
        if self.is_first(share):
            self.begin(stage)
        length = self.stages[stage][0]
        decay = 1.0 if share < 0.7 else max(0.05, (1 - share) / 0.3)
        rate = self.job["lr"] * (self.variant.first_rate if stage == 0 else 1.0)
        factor = rate * min(1.0, (self.step + 1) / 100) * decay
        for group, part in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(factor * part)
        batch = drawn(self.text["train"], length, self.tokens // length, self.job["seed"], self.step)
        number = torch.full((), self.step, device=self.device)
        loss = self.learn(number, *batch.to(self.device).tensors())
        self.losses.append(loss / math.log(2))
        self.step, self.counts[stage] = self.step + 1, self.counts[stage] + 1

    def begin(self, stage: int) -> None:
        """Attend and teach as a stage does."""
        dense = stage < self.variant.stages
        self.model.attend_densely(self.variant.branches if dense else None)
        taught = bool(self.model.indexers()) and (self.variant.taught_densely or not dense)

        def learn(number: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
            selection = SelectionLoss(seed=self.job["seed"], step=number) if taught else None
            with self.precision:
                loss = self.model(tokens, targets=targets, **({"selection": selection} if selection else {}))
            (loss + selection.total if selection else loss).backward()
            for parameters in self.clipped:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.learn = Graphed(learn) if self.device.type == "cuda" else learn

    def look(self) -> None:
        """Record the loss by position on a few sequences of 8k, and report what has been seen."""
        length = self.stages[1][0]
        bits = bits_of_bytes(self.reader, spread(self.text["choose"], length, 16), 8, self.precision)
        self.seen["looks"].append([self.step, round(self.seconds, 1), *_by_position(bits)])
        losses = torch.stack(self.losses).tolist() if self.losses else []
        every = max(1, len(losses) // 100)
        self.seen["loss"] = [round(statistics.fmean(losses[at : at + every]), 4) for at in range(0, self.step, every)]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        about = {"parameters": parameters, "steps": self.counts, "trained_s": round(self.seconds, 1)}
        self.report({name: self.job[name] for name in KEY} | about | self.seen)

    def measure(self) -> None:
        """Record the bits of both halves of the text kept back."""
        for name, (length, count) in ROWS.items():
            length //= 128 if self.job["tiny"] else 1
            if length > self.stages[-1][0]:
                continue
            for half in ("choose", "report"):
                batch = spread(self.text[half], length, 2 if self.job["tiny"] else count)
                bits = bits_of_bytes(self.reader, batch, max(1, self.tokens // length), self.precision)
                by_row = bits.mean(1)
                self.seen[f"{half} {name}"] = {
                    "mean": round(bits.mean().item(), 5),
                    "se": round((by_row.std() / len(by_row) ** 0.5).item(), 5),
                    "positions": _by_position(bits),
                }
        self.look()


def _by_position(bits: Tensor) -> list[float]:
    by_token = bits.mean(0)
    return [round(by_token[begin:end].mean().item(), 5) for begin, end in pairwise(EDGES) if begin < len(by_token)]


def copies_from(point: Point) -> int | None:
    """Return the step at which bytes 4k to 8k first cost less than bytes 512 to 1k: when copying has begun."""
    return next((step for step, _, *bits in point["looks"] if step and len(bits) > 4 and bits[4] < bits[1]), None)


def work(job: Job, report: Report) -> None:
    run = StagedRun(job, report)
    run.train(job["until"] - (0 if job["tiny"] else 45))
    run.measure()


def table(points: Sequence[Point], rows: str = "report 32k") -> str:
    """Return a line for each model and learning rate: its bits by seed, their mean and standard error."""
    ended = [point for point in points if rows in point]
    lines = []
    for model, lr in sorted({(point["model"], point["lr"]) for point in ended}):
        of = {point["seed"]: point for point in ended if (point["model"], point["lr"]) == (model, lr)}
        bits = [of[seed][rows]["mean"] for seed in sorted(of)]
        each = " ".join(f"{seed}: {of[seed][rows]['mean']:.4f}" for seed in sorted(of))
        begins = " ".join(f"{seed}: {copies_from(of[seed])}" for seed in sorted(of))
        lines.append([f"{model}, {lr:g}", f"{statistics.fmean(bits):.4f}", standard_error(bits), each, begins])
    return format_table([rows, "mean", "s.e.", "by seed", "step from which it copies"], lines)


def standard_error(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else "-"


def job_of(text: str) -> dict[str, Any]:
    """Read ``MODEL:LR:SEED``."""
    model, lr, seed = text.split(":")
    if model not in VARIANTS:
        raise ValueError(f"--job: expected one of {', '.join(VARIANTS)}, got {model!r}")
    return {"model": model, "lr": float(lr), "seed": int(seed)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, json=options.RESULTS / "stages.json", seconds=400.0, deadline=590.0, tiny=False)
    parser.add_argument(
        "--job", type=job_of, action="append", default=[], help="MODEL:LR:SEED; several are run at once"
    )
    parser.add_argument("--text", type=Path, default=Path("runs/stages/text.pt"), help="cache; default: %(default)s")
    parser.add_argument("--table", action="store_true", help="print the tables of what is recorded, and train nothing")
    parser.add_argument(
        "--ends",
        type=int,
        choices=[length for length, _ in STAGES],
        default=STAGES[-1][0],
        help="tokens of the last stage",
    )
    arguments = parser.parse_args(argv)
    stages = stages_until(arguments.ends)
    until = time.time() + arguments.deadline
    recording = options.open_recording(arguments, __doc__, keep=True)
    if not arguments.table:
        text = read_text(arguments.text, tiny=arguments.tiny)
        digests = {part: hashlib.sha256(text[part].numpy().tobytes()).hexdigest()[:16] for part in ("train", "report")}
        device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        recording.note(text=text["sizes"] | {"sha256": digests}, stages=stages, tokens_of_step=TOKENS)
        shared = {"seconds": arguments.seconds, "device": arguments.device, "until": until, "tiny": arguments.tiny}
        jobs = [job | shared | {"stages": stages, "text": arguments.text.as_posix()} for job in arguments.job]

        def report(point: Point) -> None:
            kept = {name: value for name, value in point.items() if name not in ("until", "text", "tiny", "stages")}
            recording.add(kept | {"device": device}, KEY)
            looks = point.get("looks", [[0, 0.0]])[-1]
            print(point["model"], point["lr"], point["seed"], point.get("label", looks), flush=True)

        run_jobs(work, jobs, places(1, arguments.device), report)
    for rows in ("choose 32k", "report 32k", "choose 8k", "report 8k"):
        print(f"\n{table(recording.points, rows)}")


if __name__ == "__main__":
    main()
