"""The figures reported of an earlier NSA system, and the same work done by flexnsa."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.harness.clock import Clock
from benchmarks.harness.memory import AllocatorProbe, ResidentProbe, saved_for_backward
from flexnsa.lm import DecoderConfig, DecoderLM, preset
from flexnsa.lm.estimate import estimate_training
from flexnsa.lm.estimate.training import Precision
from flexnsa.lm.measure.memory import MIB

Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, and the work that it belongs to: forward and backward of ``out.mean()``, or a training step.

    Args:
        name: to ask for it on the command line.
        group: ``memory``, ``time``, ``train`` or ``long`` (lengths that the earlier system did not reach).
        preset: of :data:`flexnsa.lm.PRESETS`.
        layers: of the model.
        seq_len: tokens.
        batch: sequences.
        theirs: MiB after forward, seconds, or for ``train`` seconds a step.
        remark: what is known of their figure.
    """

    name: str
    group: str
    preset: str
    layers: int
    seq_len: int
    batch: int = 1
    theirs: float | None = None
    remark: str = ""

    @property
    def measures_memory(self) -> bool:
        """Whether the figure is one of memory; the others are of time."""
        return self.group in ("memory", "long")

    def config(self) -> DecoderConfig:
        """Model of the row; only training steps are checkpointed."""
        return preset(self.preset, num_layers=self.layers, checkpointing=self.group == "train")


def _memory(preset_name: str, layers: int, seq_len: int, theirs: float | None, remark: str = "") -> Row:
    name = f"{preset_name}-{layers}-{seq_len}"
    group = "memory" if theirs is not None else "long"
    return Row(name=name, group=group, preset=preset_name, layers=layers, seq_len=seq_len, theirs=theirs, remark=remark)


def _time(layers: int, seq_len: int, theirs: float, remark: str = "") -> Row:
    name = f"time-{layers}-{seq_len}"
    return Row(name=name, group="time", preset="large", layers=layers, seq_len=seq_len, theirs=theirs, remark=remark)


def _train(name: str, seq_len: int, batch: int, theirs: float, remark: str) -> Row:
    work = {"group": "train", "preset": "m7c-cpu", "layers": 12, "seq_len": seq_len, "batch": batch}
    return Row(name=name, theirs=theirs, remark=remark, **work)


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        _memory("large", 5, 128, 483),
        _memory("large", 5, 256, 1425),
        _memory("large", 5, 512, 5165),
        _memory("large", 5, 1024, 12020),
        _memory("large", 5, 2048, 20557),
        _memory("large", 4, 128, 388),
        _memory("large", 12, 2048, 49023),
        _memory("small", 5, 128, 60),
        _memory("small", 12, 128, 132),
        _time(5, 2048, 85.5, "85 to 86 s on an A100"),
        _time(1, 256, 2.09),
        _time(2, 256, 3.05),
        _time(4, 256, 6.2),
        _time(12, 256, 19.3),
        _train("m7c-cpu", 512, 2, 256, "one step on two cores"),
        _train("train-128", 128, 8, 128 * 8 / 153, "153 tokens/s"),
        _train("train-256", 256, 1, 256 / 66, "66 tokens/s; its batch is not recorded, 1 taken here"),
        _memory("large", 5, 8192, None),
        _memory("large", 5, 16384, None),
        _memory("large", 5, 32768, None),
        _memory("large", 5, 65536, None),
    )
}


def measure_memory(progress: Progress, row: Row, device: str, precision: Precision) -> dict[str, Any]:
    """MiB allocated after forward and at the peak of forward and backward, and what autograd saved of them."""
    torch.manual_seed(0)
    if device == "cuda":
        # Kernels, cached masks and the libraries' workspaces, kept for good.
        _forward_backward(progress, replace(row, layers=1), device, precision)
    with AllocatorProbe(device) as probe:
        model, tokens = _model(progress, row, device)
        probe.mark("model")
        progress("forward")
        with saved_for_backward(list(model.parameters())) as saved:
            loss = _loss(model, tokens, precision)
        saved_bytes = saved.total
        probe.mark("forward")
        progress("backward")
        loss.backward()
        probe.mark("backward")
        progress("summing up")
    return {
        "parameters": probe.at["model"] / MIB,
        "saved": saved_bytes / MIB,
        "after_forward": probe.at["forward"] / MIB,
        "peak_forward": probe.peak["forward"] / MIB,
        "peak": max(probe.peak["forward"], probe.peak["backward"]) / MIB,
    }


def measure_resident(progress: Progress, row: Row, precision: Precision) -> dict[str, Any]:
    """The same by the operating system's count for the process, above what it was before the model, in MiB."""
    torch.manual_seed(0)
    _forward_backward(progress, replace(row, seq_len=64, layers=1), "cpu", precision)  # code that any length needs
    probe = ResidentProbe()
    model, tokens = _model(progress, row, "cpu")
    progress("forward")
    loss = _loss(model, tokens, precision)
    after_forward = probe.now()
    progress("backward")
    loss.backward()
    return {"resident_after_forward": after_forward / MIB, "resident_peak": probe.peak() / MIB}


def measure_time(progress: Progress, row: Row, device: str, repeats: int = 3) -> dict[str, Any]:
    """Seconds of forward and backward, median; the first one warms up."""
    torch.manual_seed(0)
    model, tokens = _model(progress, row, device)
    seconds, clock = [], Clock("wall", device)
    for number in range(repeats + 1):
        progress(f"forward and backward {number} of {repeats}")
        seconds.append(clock.time(lambda: model(tokens).mean().backward()) / 1e3)
        model.zero_grad()
    return {"seconds": statistics.median(seconds[1:]), "first_seconds": seconds[0]}


def measure_training(progress: Progress, row: Row, device: str) -> dict[str, Any]:
    """Seconds of two whole training steps, and the loss of the first: real text, AdamW, clipping, checkpointing."""
    from flexnsa.lm import TRAIN_PRESETS, Trainer, read_corpus

    torch.manual_seed(0)
    config = replace(TRAIN_PRESETS["m7c-cpu"], batch_size=row.batch, seq_len=row.seq_len)
    progress("reading text")
    corpus = read_corpus(None)
    progress("building the model")
    trainer = Trainer(DecoderLM(row.config()).to(device), corpus, config)
    seconds, losses, clock = [], [], Clock("wall", device)
    for number in (1, 2):
        progress(f"step {number}")
        seconds.append(clock.time(lambda: losses.append(trainer.train_step().loss)) / 1e3)
    return {"seconds": seconds[0], "second_step_seconds": seconds[1], "first_loss": losses[0]}


def estimate(row: Row, device: str, precision: Precision) -> dict[str, float]:
    """What :mod:`flexnsa.lm.estimate` says, in MiB."""
    figures = estimate_training(
        row.config(),
        seq_len=row.seq_len,
        batch_size=row.batch,
        precision=precision,
        impl="triton" if device == "cuda" else "sdpa",
        fused_norm=device == "cuda",
    )
    return {
        "estimated_after_forward": figures.after_forward / MIB,
        "estimated_peak": max(figures.peak_forward, figures.peak_training) / MIB,
    }


def _model(progress: Progress, row: Row, device: str) -> tuple[DecoderLM, torch.Tensor]:
    progress("building the model")
    tokens = torch.randint(256, (row.batch, row.seq_len), device=device)
    return DecoderLM(row.config()).to(device), tokens


def _loss(model: DecoderLM, tokens: torch.Tensor, precision: Precision) -> torch.Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return model(tokens).mean()


def _forward_backward(progress: Progress, row: Row, device: str, precision: Precision) -> None:
    model, tokens = _model(progress, row, device)
    progress("warming up")
    _loss(model, tokens, precision).backward()
