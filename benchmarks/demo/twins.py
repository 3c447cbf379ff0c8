"""NSA and dense models, trained on the same bytes: a process and a share of the cores for each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness.clock import Clock
from flexnsa.lm.data.corpus import read_corpus
from flexnsa.lm.generation.generate import generate
from flexnsa.lm.measure.process import Died, started
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.training.config import TrainConfig
from flexnsa.lm.training.trainer import Trainer

PROMPT = b"    def __init__(self, "


@dataclass(slots=True)
class TwinResult:
    """Training of one model; curves hold ``(bytes of text, bits per byte)``, or the selection loss of each step."""

    name: str
    parameters: int = 0
    seconds: float = 0.0
    training_curve: list[tuple[int, float]] = field(default_factory=list)
    validation_curve: list[tuple[int, float]] = field(default_factory=list)
    selection_curve: list[float] = field(default_factory=list)
    sample: str = ""

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of validation text after the last step."""
        return self.validation_curve[-1][1]


def train_twins(models: dict[str, DecoderConfig], training: TrainConfig, sample_bytes: int) -> list[TwinResult]:
    """Train models from one seed on the same bytes, and draw a sample of each."""
    from tqdm import tqdm

    threads = max(1, torch.get_num_threads() // len(models))
    jobs = [(model, training, sample_bytes, threads) for model in models.values()]
    with started(_train, jobs) as group:
        results = list(map(TwinResult, models))
        bars = [
            tqdm(total=training.steps, desc=f"{name:11}", position=position, unit="step")
            for position, name in enumerate(models)
        ]
        for number, message in group.messages():
            if isinstance(message, Died):
                if message.exitcode:
                    raise RuntimeError("a training process died before its end; its traceback is above")
                continue
            kind, value = message
            _record(results[number], kind, value)
            if kind == "loss":
                bars[number].set_postfix_str(f"{value[1]:.2f} bits per byte", refresh=False)
                bars[number].update()
        for bar in bars:
            bar.close()
    return results


def _record(result: TwinResult, kind: str, value: Any) -> None:
    if kind == "loss":
        result.training_curve.append(value)
    elif kind == "validation":
        result.validation_curve.append(value)
    elif kind == "selection":
        result.selection_curve.append(value)
    else:
        setattr(result, kind, value)


def _train(
    sender: Connection, model_config: DecoderConfig, config: TrainConfig, sample_bytes: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    model = DecoderLM(model_config)
    trainer = Trainer(model, read_corpus(), config)
    sender.send(("parameters", sum(parameter.numel() for parameter in model.parameters())))
    seconds, clock = 0.0, Clock()
    for step in range(1, config.steps + 1):
        start = clock.start()
        result = trainer.train_step()
        seconds += clock.since(start) / 1e3
        seen = step * config.tokens_per_step
        sender.send(("loss", (seen, result.loss / math.log(2))))
        if result.selection_loss is not None:
            sender.send(("selection", result.selection_loss))
        if step % config.eval_every == 0 or step == config.steps:
            sender.send(("validation", (seen, trainer.validation_bits_per_byte())))
    sender.send(("seconds", seconds))
    text = generate(model, PROMPT, sample_bytes, temperature=0.8)
    sender.send(("sample", (PROMPT + text).decode(errors="replace").rstrip()))
