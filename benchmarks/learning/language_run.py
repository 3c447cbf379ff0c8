"""A model on its way through text, kept in a folder: what it predicts on the way, and in the end what it does."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.learning.habits import habits, mean_gates, mean_selection
from benchmarks.learning.reading import CHOICES, bits_of_bytes, blocks_chosen, choices
from benchmarks.learning.workers import Report
from flexnsa.files import write_whole
from flexnsa.lm import Batch, Corpus, DecoderLM, TrainConfig, Trainer
from flexnsa.lm.training.checkpoint import CHECKPOINT_NAME, load_checkpoint, save_checkpoint

POSITIONS = tuple(64 * edge for edge in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
"""Tokens of a sequence between which the loss by position is averaged; where it is shorter, the first of them."""
GATES_EVERY = 4
"""Evaluations from one recording of gates and selection to the next; they are recorded after the last step, too."""
TRACED = 2
"""Sequences on which the selection is recorded: their whole softmax is computed."""
GROUPS = 32
"""Of held-out sequences, each with its mean: enough for the standard error of a difference of models, paired."""


@dataclass(frozen=True, kw_only=True)
class Finals:
    """What is read when training is over: so many held-out rows, fewer with other blocks, fewest for the habits."""

    rows: int = 512
    rows_of_choices: int = 128
    rows_of_habits: int = 8


def final_names(attention: str) -> tuple[str, ...]:
    """Name what is measured after the last step."""
    if attention == "dense":
        return ("bits",)
    return ("bits", "habits", *(f"bits with {name} blocks" for name in CHOICES))


@dataclass
class Record:
    """What a run has seen so far.

    Args:
        step: of training.
        seconds: of training alone, without the first step of each start, which compiles.
        first_step_s: seconds of those.
        loss: of each step.
        held_out: ``[step, seconds, loss]`` of rows that nothing is learned from.
        gates: ``[step, mean gates by layer and branch]``, every :data:`GATES_EVERY` evaluations.
        selection: ``[step, recall, mass missed]`` then, both by layer and key head.
        finals: by name, what was measured after the last step.
    """

    step: int = 0
    seconds: float = 0.0
    first_step_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    held_out: list[Any] = field(default_factory=list)
    gates: list[Any] = field(default_factory=list)
    selection: list[Any] = field(default_factory=list)
    finals: dict[str, Any] = field(default_factory=dict)

    def back_to(self, step: int) -> None:
        """Forget what came after a step, where a run was killed between its record and its checkpoint."""
        if self.step == step:
            return
        for entries in (self.held_out, self.gates, self.selection):
            entries[:] = [entry for entry in entries if entry[0] <= step]
        self.seconds = self.held_out[-1][1] if self.held_out else 0.0
        self.step, self.loss, self.finals = step, self.loss[:step], {}


class LanguageRun:
    """Train a model in a folder, and look at it; all losses are bits per byte.

    ``build`` makes it, of the numbers of the training's seed.
    """

    def __init__(
        self,
        build: Callable[[], DecoderLM],
        corpus: Corpus,
        training: TrainConfig,
        finals: Finals,
        *,
        device: str,
        folder: Path,
        compiled: bool,
    ) -> None:
        self.training, self.finals, self.folder = training, finals, folder
        torch.manual_seed(training.seed)
        model = build()
        self.initial = copy.deepcopy(model).eval()
        self.trainer = Trainer(model.to(device), corpus, training, compiled=compiled)
        # Hooks on layers cannot be compiled with them: an uncompiled model with the same parameters has them.
        self.reader = copy.deepcopy(model).eval()
        self.reader.load_state_dict(model.state_dict(), assign=True)
        self.precision = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=training.precision == "bf16")
        self.record = Record()
        if (folder / CHECKPOINT_NAME).exists():
            load_checkpoint(folder / CHECKPOINT_NAME, self.trainer)
            self.record = Record(**json.loads((folder / "record.json").read_text()))
            self.record.back_to(self.trainer.step)

    def resume(self, until: float, report: Report) -> None:
        """Train until the steps or the time, ``time.time()``, are up; after the last step do what is left to do."""
        training, record = self.training, self.record
        first = record.step
        if not record.held_out:
            self._evaluate()
        report(self.describe())
        while record.step < training.steps and time.time() < until:
            self._train_step(compiles=record.step == first)
            if record.step % training.eval_every == 0 or record.step == training.steps:
                self._evaluate()
                report(self.describe())
            if record.step % training.checkpoint_every == 0 and record.step < training.steps:
                self._save()
        if record.step > first:
            self._save()
        if record.step == training.steps:
            for name, measure in self._final_measures():
                if "label" in record.finals.get(name, {"label": "not yet"}) and time.time() < until:
                    torch.manual_seed(training.seed)  # blocks are drawn
                    record.finals[name] = _attempt(measure)
                    self._save_record()
                    report(self.describe())

    def describe(self) -> dict[str, Any]:
        """Return what the run has seen; losses of training are means between evaluations."""
        seen = asdict(self.record)
        every = self.training.eval_every
        losses = [self.record.loss[begin : begin + every] for begin in range(0, len(self.record.loss), every)]
        parameters = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        return seen | {"parameters": parameters, "loss": [round(fmean(part), 4) for part in losses]}

    def _train_step(self, *, compiles: bool) -> None:
        start = time.perf_counter()
        self.record.loss.append(round(self.trainer.train_step().loss / math.log(2), 4))
        seconds = time.perf_counter() - start
        self.record.step += 1
        if compiles:
            self.record.first_step_s.append(round(seconds, 2))
        else:
            self.record.seconds += seconds

    def _evaluate(self) -> None:
        record, batch = self.record, self._rows(self.training.eval_sequences)
        bits = bits_of_bytes(self.reader, batch, self.training.batch_size, self.precision).mean().item()
        record.held_out.append((record.step, round(record.seconds, 2), round(bits, 5)))
        last = record.step == self.training.steps
        if self.reader.config.attention == "nsa" and (last or (len(record.held_out) - 1) % GATES_EVERY == 0):
            tokens = batch.tokens[: self.training.batch_size].to(self.trainer.device)
            record.gates.append((record.step, mean_gates(self.reader, tokens, self.precision)))
            record.selection.append((record.step, *mean_selection(self.reader, tokens[:TRACED], self.precision)))

    def _rows(self, count: int) -> Batch:
        return self.trainer.validation_rows.spread(count)

    def _final_measures(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        yield "bits", self._all_bits
        if self.reader.config.attention == "nsa":
            tokens = self._rows(self.finals.rows_of_habits).tokens.to(self.trainer.device)
            yield "habits", lambda: habits(self.reader, tokens, self.precision)
            self.initial.to(self.trainer.device)
            for name in CHOICES:
                yield f"bits with {name} blocks", lambda name=name: self._bits_with(name)

    def _all_bits(self) -> dict[str, Any]:
        """Return the mean over many sequences, means of groups of them, and means by position over all."""
        bits = self._bits(self.finals.rows)
        groups = bits.tensor_split(min(GROUPS, len(bits)))
        return _means(bits) | {"num_rows": len(bits), "groups": [round(part.mean().item(), 4) for part in groups]}

    def _bits_with(self, name: str) -> dict[str, Any]:
        """Return the mean over sequences, and by position, where layers read blocks that are chosen so."""
        with blocks_chosen(self.reader, choices(self.reader, self.initial)[name]):
            return _means(self._bits(self.finals.rows_of_choices))

    def _bits(self, rows: int) -> Tensor:
        return bits_of_bytes(self.reader, self._rows(rows), self.training.batch_size, self.precision)

    def _save(self) -> None:
        self._save_record()  # first: what it has too much is forgotten
        save_checkpoint(self.folder / CHECKPOINT_NAME, self.trainer)

    def _save_record(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / "record.json", json.dumps(asdict(self.record)))


def _means(bits: Tensor) -> dict[str, Any]:
    """Average bits of ``(sequences, tokens)``: over all, and by position between neighbouring :data:`POSITIONS`."""
    by_token = bits.mean(0)
    parts = [by_token[begin:end] for begin, end in pairwise(POSITIONS) if begin < len(by_token)]
    return {"mean": round(bits.mean().item(), 5), "positions": [round(part.mean().item(), 5) for part in parts]}


def _attempt(measure: Callable[[], Any]) -> Any:
    """Measure, or give a label: what goes wrong costs no other measure, and the next start tries again."""
    try:
        return measure()
    except Exception as error:
        return {"label": f"{type(error).__name__}: {str(error).strip()[:300]}"}
