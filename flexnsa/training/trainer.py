"""One training step, and the state that it moves on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.distributed import Ranks
from flexnsa.distributed.chunks import check_chunks
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training.config import TrainConfig, completed
from flexnsa.training.data import Corpus
from flexnsa.training.optimizer import build_optimizer, set_learning_rate
from flexnsa.training.rows import Batch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step reports: natural-log loss, learning rate and the gradient's norm before clipping."""

    step: int
    loss: float
    lr: float
    grad_norm: float


class Trainer:
    """A model, its optimizer and the number of steps done; the data follow from that number.

    Args:
        model: of the corpus's tokens, on the device to train on.
        corpus: text to train and validate on.
        config: hyper-parameters.
        compiled: run the layers of the model through ``torch.compile``, all through the same code.
        ranks: the processes that train together, which have built the model; by default, this one on its own.

    Raises:
        ValueError: as of :func:`check_training`.
    """

    def __init__(
        self,
        model: DecoderLM,
        corpus: Corpus,
        config: TrainConfig,
        *,
        compiled: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks = Ranks() if ranks is None else ranks
        self.device = model.embedding.weight.device
        check_training(model.config, corpus, config, self.device, ranks.world_size, ranks.context_parallel)
        self.model, self.corpus, self.asked = model, corpus, config
        validation, rows = corpus.tokens("validation"), (config.seq_len, config.pack)
        self.training_rows = corpus.tokens("train").rows(*rows)
        self.validation_rows = validation.rows(*rows)
        self.validation_bytes = validation.bytes_of_spread_rows(*rows, config.eval_sequences)
        self.parameters = dict(model.named_parameters())  # once: those of a gathered layer are others
        self.go_by(completed(config))
        self.step = 0
        self.checks: list[Callable[[], object]] = []
        """Called on all ranks before anything follows from a step's gradients or from an evaluation."""
        self.compiled = compiled
        if compiled:
            ranks.compile(model)
        self._forward = ranks.wrap(model)
        self._is_settled = False

    def go_by(self, config: TrainConfig) -> None:
        """Train as another config says, from the parameters as they are, with an optimizer that has seen nothing."""
        self.config = config
        self.optimizer = build_optimizer(self.model, config)

    def configs(self) -> dict[str, Any]:
        """Give what decides the numbers of the run, as plain values."""
        # The corpus first: where the tokenizer is another, so is the model, which follows from it.
        corpus = self.corpus.fingerprints()
        return {"corpus": corpus, "model": self.model.config.to_dict(), "training": asdict(self.config)}

    def train_step(self) -> StepResult:
        """Take one optimizer step.

        Raises:
            FloatingPointError: loss or gradient is not finite; the parameters have not been touched.
        """
        config, ranks = self.config, self.ranks
        # A function of seed and step and nothing else, so that resuming needs no state of the data, and no rank has to
        # be told what the others have drawn.
        draws = random.Random(f"{config.seed}/{self.step}")
        batch = self.training_rows.draw(draws, config.batch_size * config.grad_accumulation)
        parts = batch[ranks.share(len(batch))].split(config.batch_size)
        self.model.train()
        if not self._is_settled:
            ranks.settle(lambda: self.loss(parts[0].to(self.device)).backward())
            self.optimizer.zero_grad()
            self._is_settled = True
        own_loss = torch.zeros((), device=self.device)
        for index, part in enumerate(parts):
            with ranks.part(self._forward, last=index == len(parts) - 1):
                # Of the predictions of all ranks, whose gradients are averaged.
                loss = self.loss(part.to(self.device)) / batch.num_targets()
                (loss * ranks.world_size).backward()
            own_loss += loss.detach()
        self._check()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), config.clip)
        loss, grad_norm = ranks.total(own_loss.item()), norm.item()
        if not math.isfinite(loss + grad_norm):
            raise FloatingPointError(f"step {self.step}: loss {loss}, gradient norm {grad_norm}")
        lr = config.learning_rate(self.step)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        result = StepResult(self.step, loss, lr, grad_norm)
        self.step += 1
        return result

    def loss(self, batch: Batch) -> Tensor:
        """Give the summed cross-entropy, in nats, of predicting each of this rank's targets from what is before it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            tokens, targets = self.ranks.cut(batch.tokens), self.ranks.cut(batch.targets)
            return self._forward(tokens, targets=targets, reduction="sum", document_ids=batch.document_ids)

    @torch.no_grad()
    def validation_bits_per_byte(self) -> float:
        """Evaluate on the validation text, always on the same rows."""
        self.model.eval()
        batch = self.validation_rows.spread(self.config.eval_sequences)
        own_rows = batch[self.ranks.share(len(batch))]
        nats = sum(self.loss(part.to(self.device)).item() for part in own_rows.split(self.config.batch_size))
        self._check()
        return self.ranks.total(nats) / self.validation_bytes / math.log(2)

    def _check(self) -> None:
        for check in self.checks:
            check()


def check_training(
    model: DecoderConfig,
    corpus: Corpus,
    config: TrainConfig,
    device: torch.device,
    world_size: int = 1,
    context_parallel: int = 1,
) -> None:
    """Demand what a run needs that no config knows alone.

    Raises:
        ValueError: the text is shorter than a row, the model's attention cannot be trained on the device, or
            ``world_size`` processes, of which ``context_parallel`` share the tokens of the same sequences, cannot share
            them, or the sequences of a step or of an evaluation, evenly.
    """
    corpus.require_rows(config.seq_len)
    if model.attention == "nsa" and model.impl == "flex" and device.type == "cpu":
        raise ValueError("impl: expected 'auto' or 'sdpa' to train on a CPU, where flex has no backward, got 'flex'")
    if context_parallel > 1:
        _check_tokens(model, config, context_parallel)
    sharing = world_size // context_parallel
    rows = {
        "batch_size": ("batch_size * grad_accumulation", config.batch_size * config.grad_accumulation),
        "eval_sequences": ("eval_sequences", config.eval_sequences),
    }
    for name, (what, count) in rows.items():
        if count % sharing:
            groups = "processes" if context_parallel == 1 else f"groups of {context_parallel} processes"
            raise ValueError(f"{name}: expected {what} to be a multiple of {sharing} {groups}, got {count}")


def _check_tokens(model: DecoderConfig, config: TrainConfig, context_parallel: int) -> None:
    """Demand sequences whose tokens processes can share."""
    if model.attention != "nsa":
        raise ValueError(f"attention: expected 'nsa' with context_parallel, got {model.attention!r}")
    if config.pack:
        raise ValueError("pack: expected False with context_parallel, because documents begin anywhere, got True")
    check_chunks("seq_len", config.seq_len, 2 * context_parallel, model.nsa, model.branches)
