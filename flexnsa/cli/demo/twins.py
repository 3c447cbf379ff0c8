"""NSA and its dense twin, trained side by side on the same bytes: one process each, half of the cores each."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from flexnsa.measure.clock import Clock
from flexnsa.models import DecoderConfig, DecoderLM, generate
from flexnsa.training import TrainConfig, Trainer, read_corpus

PROMPT = b"    def __init__(self, "


@dataclass(slots=True)
class TwinResult:
    """What became of one model; curves hold ``(bytes of text, bits per byte)``."""

    name: str
    parameters: int = 0
    seconds: float = 0.0
    training_curve: list[tuple[int, float]] = field(default_factory=list)
    validation_curve: list[tuple[int, float]] = field(default_factory=list)
    sample: str = ""

    @property
    def bits_per_byte(self) -> float:
        """On validation text, after the last step."""
        return self.validation_curve[-1][1]


def train_twins(model: DecoderConfig, training: TrainConfig, sample_bytes: int) -> list[TwinResult]:
    """Train ``attention="dense"`` and ``"nsa"`` from the same seed on the same bytes, and let both write."""
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // 2)
    results, processes, bars = {}, [], {}
    for position, attention in enumerate(("dense", "nsa")):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (replace(model, attention=attention), training, sample_bytes, threads, sender)
        processes.append(context.Process(target=_train, args=arguments, daemon=True))
        processes[-1].start()
        sender.close()
        results[receiver] = TwinResult("NSA" if attention == "nsa" else "dense")
        bars[receiver] = tqdm(total=training.steps, desc=f"{attention:5}", position=position, unit="step")
    for receiver, (kind, value) in _messages(list(results)):
        _record(results[receiver], kind, value)
        if kind == "loss":
            bars[receiver].set_postfix_str(f"{value[1]:.2f} bits per byte", refresh=False)
            bars[receiver].update()
    for process, bar in zip(processes, bars.values(), strict=True):
        process.join()
        bar.close()
    return list(results.values())


def _messages(receivers: list[Connection]) -> Iterator[tuple[Connection, tuple[str, Any]]]:
    while receivers:
        for receiver in wait(receivers):
            assert isinstance(receiver, Connection)
            try:
                kind, value = receiver.recv()
            except EOFError:
                raise RuntimeError("a training process died before its end; its traceback is above") from None
            if kind == "end":
                receivers.remove(receiver)
            else:
                yield receiver, (kind, value)


def _record(result: TwinResult, kind: str, value: Any) -> None:
    if kind == "loss":
        result.training_curve.append(value)
    elif kind == "validation":
        result.validation_curve.append(value)
    else:
        setattr(result, kind, value)


def _train(
    model_config: DecoderConfig, config: TrainConfig, sample_bytes: int, threads: int, send_to: Connection
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    model = DecoderLM(model_config)
    trainer = Trainer(model, read_corpus(), config)
    send_to.send(("parameters", sum(parameter.numel() for parameter in model.parameters())))
    seconds, clock = 0.0, Clock()
    for step in range(1, config.steps + 1):
        start = clock.start()
        result = trainer.train_step()
        seconds += clock.since(start) / 1e3
        seen = step * config.batch_size * config.grad_accumulation * config.seq_len
        send_to.send(("loss", (seen, result.loss / math.log(2))))
        if step % config.eval_every == 0 or step == config.steps:
            send_to.send(("validation", (seen, trainer.validation_bits_per_byte())))
    send_to.send(("seconds", seconds))
    text = generate(model, PROMPT, sample_bytes, temperature=0.8)
    send_to.send(("sample", (PROMPT + text).decode(errors="replace").rstrip()))
    send_to.send(("end", None))
