"""Do the work that an earlier NSA system reported figures of, and print both: memory, time, a training step.

    python -m benchmarks earlier_nsa                    # all rows, some minutes on two cores
    python -m benchmarks earlier_nsa --rows memory      # those of one kind

*After forward* is what the allocator has handed out when forward is done: parameters, tokens, and all that autograd
keeps for backward; nothing has been freed, nothing is counted twice. *Peak* is the most it had handed out at any moment
of forward and backward of ``out.mean()``, gradients included. Both are in MiB, as the earlier system counted. Every row
is measured in a process of its own, and replaces an earlier one in the file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.fresh import run_fresh
from benchmarks.harness.memory import AllocatorProbe
from flexnsa.lm import TRAIN_PRESETS, DecoderConfig, DecoderLM, Trainer, preset, read_corpus
from flexnsa.lm.estimate import estimate_training
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.measure.table import format_table

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One reported figure, and the work that it belongs to.

    Args:
        group: ``memory``, ``time`` or ``train``.
        preset: of :data:`flexnsa.lm.PRESETS`.
        layers: of the model.
        seq_len: tokens.
        theirs: MiB after forward; seconds of forward and backward; or for ``train`` seconds of a step.
        batch: sequences.
    """

    group: str
    preset: str
    layers: int
    seq_len: int
    theirs: float
    batch: int = 1

    @property
    def name(self) -> str:
        """Its work in short."""
        return f"{self.group}: {self.preset}, {self.layers} layers, {self.batch} x {self.seq_len}"

    @property
    def config(self) -> DecoderConfig:
        """Model of the row; only training steps are checkpointed."""
        return preset(self.preset, num_layers=self.layers, checkpointing=self.group == "train")

    def model(self, device: str) -> tuple[DecoderLM, Tensor]:
        """Build the model, and tokens to read."""
        torch.manual_seed(0)
        tokens = torch.randint(256, (self.batch, self.seq_len), device=device)
        return DecoderLM(self.config).to(device), tokens


ROWS = (
    Row("memory", "large", 5, 128, 483),
    Row("memory", "large", 5, 256, 1425),
    Row("memory", "large", 5, 512, 5165),
    Row("memory", "large", 5, 1024, 12020),
    Row("memory", "large", 5, 2048, 20557),
    Row("memory", "large", 4, 128, 388),
    Row("memory", "large", 12, 2048, 49023),
    Row("memory", "small", 5, 128, 60),
    Row("memory", "small", 12, 128, 132),
    Row("time", "large", 5, 2048, 85.5),  # 85 to 86 s on an A100
    Row("time", "large", 1, 256, 2.09),
    Row("time", "large", 2, 256, 3.05),
    Row("time", "large", 4, 256, 6.2),
    Row("time", "large", 12, 256, 19.3),
    Row("train", "m7c-cpu", 12, 512, 256, batch=2),  # on two cores
    Row("train", "m7c-cpu", 12, 128, 128 * 8 / 153, batch=8),  # reported as 153 tokens a second
    Row("train", "m7c-cpu", 12, 256, 256 / 66),  # as 66 tokens a second; its batch is not recorded, 1 taken here
)


def memory(progress: Progress, row: Row, device: str) -> dict[str, float]:
    """MiB allocated after forward and at the peak, and what :mod:`flexnsa.lm.estimate` says of both."""
    if device == "cuda":  # kernels, cached masks and the libraries' workspaces, kept for good
        model, tokens = replace(row, layers=1).model(device)
        model(tokens).mean().backward()
    with AllocatorProbe(device) as probe:
        model, tokens = row.model(device)
        progress("forward")
        loss = model(tokens).mean()
        probe.mark("forward")
        progress("backward")
        loss.backward()
        probe.mark("backward")
        progress("summing up")
    cuda = device == "cuda"
    estimate = estimate_training(
        row.config,
        seq_len=row.seq_len,
        batch_size=row.batch,
        impl="triton" if cuda else "sdpa",
        fused_norm=cuda,
    )
    return {
        "after_forward": probe.at["forward"] / MIB,
        "peak": max(probe.peak.values()) / MIB,
        "estimated_after_forward": estimate.after_forward / MIB,
        "estimated_peak": max(estimate.peak_forward, estimate.peak_training) / MIB,
    }


def seconds(progress: Progress, row: Row, device: str) -> dict[str, float]:
    """Seconds of forward and backward, median of three; the first one warms up."""
    model, tokens = row.model(device)
    clock = Clock("wall", device)
    times = []
    for number in range(4):
        progress(f"forward and backward {number} of 3")
        times.append(clock.time(lambda: model(tokens).mean().backward()) / 1e3)
        model.zero_grad()
    return {"seconds": statistics.median(times[1:]), "first_seconds": times[0]}


def training_step(progress: Progress, row: Row, device: str) -> dict[str, float]:
    """Seconds of a first whole step, and its loss: real text, AdamW, clipping, checkpointing."""
    model, _ = row.model(device)
    config = replace(TRAIN_PRESETS["m7c-cpu"], batch_size=row.batch, seq_len=row.seq_len)
    trainer, losses = Trainer(model, read_corpus(None), config), []
    progress("step")
    taken = Clock("wall", device).time(lambda: losses.append(trainer.train_step().loss)) / 1e3
    return {"seconds": taken, "first_loss": losses[0]}


MEASURES = {"memory": memory, "time": seconds, "train": training_step}
WORK = ("group", "preset", "layers", "seq_len", "batch", "device")
"""What tells rows of a file apart."""


def table(points: Sequence[dict[str, Any]]) -> str:
    """A line a row, their figure in MiB or seconds beside ours."""
    rows = []
    for point in points:
        ours = point.get("after_forward", point.get("seconds"))
        ratio = f"{point['theirs'] / ours:.1f}" if ours and point["theirs"] else point.get("label", "-")
        figures = [point["theirs"], ours, *(point.get(name) for name in ("estimated_after_forward", "peak"))]
        rows.append([point["name"], *("-" if x is None else f"{x:,.1f}" for x in figures), ratio])
    return format_table(["MiB or s", "theirs", "ours", "estimate", "our peak", "theirs / ours"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__, json=Path("runs/earlier_nsa.json"), seconds=600)
    parser.add_argument("--rows", nargs="+", choices=MEASURES, default=list(MEASURES), help="default: all")
    arguments = parser.parse_args(argv)
    recording = options.open_recording(arguments, __doc__, keep=True)
    recording.note(setting={"device": arguments.device})
    limits: dict[str, Any] = {"seconds": arguments.seconds, "limit_memory": arguments.device == "cpu"}
    for row in ROWS:
        if row.group in arguments.rows:
            measured = run_fresh(MEASURES[row.group], row, arguments.device, **limits)
            point = {"name": row.name, "device": arguments.device, **asdict(row), **measured}
            recording.add(point, WORK)
            print(table([point]).splitlines()[-1], flush=True)
    print("\n" + table(recording.points) + f"\n\nRecorded in {arguments.json}.")


if __name__ == "__main__":
    main()
