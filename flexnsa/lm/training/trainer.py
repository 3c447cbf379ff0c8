"""One training step: its sequences, its loss, its optimizer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexnsa.attention.compilation import MAX_VARIANTS
from flexnsa.layers.indexer import SelectionLoss
from flexnsa.layers.sharding import whole
from flexnsa.lm.data.corpus import Corpus
from flexnsa.lm.data.rows import Batch, PackedDocuments, Windows
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.checks import check_cuda_graph, check_training
from flexnsa.lm.training.config import TrainConfig, completed
from flexnsa.lm.training.teaching import Teaching
from flexnsa.operators.graphs import Graphed
from flexnsa.optim import COMPRESSOR_LR, index_parameters, parameter_groups


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss of a step in nats, its learning rate, and the norm of the gradient before clipping.

    A model whose indexers learn has a selection loss too, and the norm of its gradient, which reaches them alone.
    ``dense`` is True in a dense stage, and where indexers learn alone: there ``grad_norm`` is 0.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    selection_loss: float | None = None
    selection_grad_norm: float | None = None
    dense: bool | None = None

    def to_dict(self) -> dict[str, float]:
        """Return what there is, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def require_finite(self) -> None:
        """Check that all numbers are finite.

        Raises:
            FloatingPointError: one is not.
        """
        numbers = {"loss": self.loss, "gradient norm": self.grad_norm}
        numbers |= {"selection loss": self.selection_loss, "its gradient norm": self.selection_grad_norm}
        measured = {name: number for name, number in numbers.items() if number is not None}
        if not all(map(math.isfinite, measured.values())):
            values = ", ".join(f"{name} {number}" for name, number in measured.items())
            raise FloatingPointError(f"step {self.step}: {values}")


class Drawn(NamedTuple):
    """This rank's sequences of a step, and on the device its number and the targets of all ranks, scalars."""

    step: int
    batch: Batch
    number: Tensor
    num_targets: Tensor


class Trainer:
    """A model, its optimizer and the number of steps done, which also decides the next data.

    Args:
        model: for the tokens of the corpus, on the device to train on.
        corpus: text to train on and to validate on.
        config: hyper-parameters.
        compiled: run the layers of the model through ``torch.compile``; all share the same code.
        cuda_graph: replay each step but the first two of a length as one CUDA graph. The host, which otherwise needs
            longer than a GPU for a step of few tokens, then needs next to nothing. Learning rates are rounded to fp32.
        ranks: the processes that train together and have built the model; by default this process alone.

    Raises:
        ValueError: as of :func:`~flexnsa.lm.training.checks.check_training`, or ``cuda_graph`` without a GPU or with
            several processes.
        RanksDifferError: the model, the config, the text or ``compiled`` differs between ranks; raised on all of them.
    """

    def __init__(
        self,
        model: DecoderLM,
        corpus: Corpus,
        config: TrainConfig,
        *,
        compiled: bool = False,
        cuda_graph: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks = Ranks() if ranks is None else ranks
        self.device = model.embedding.weight.device
        self.model, self.corpus, self.asked, self.config = model, corpus, config, completed(config)
        ranks.require_same(lambda: {**self.configs(), "training": asdict(config), "compiled": compiled})
        check_training(model.config, corpus, config, self.device, ranks.world_size, ranks.context_parallel)
        check_cuda_graph(cuda_graph, self.device, ranks.world_size)
        self.cuda_graph = cuda_graph
        validation, rows = corpus.tokens("validation"), (config.seq_len, config.pack)
        self.training_rows = corpus.tokens("train").rows(self.config.at(0).seq_len, config.pack)
        self.validation_rows = validation.rows(*rows)
        self.validation_bytes = validation.bytes_of_spread_rows(*rows, config.eval_sequences)
        self.parameters = dict(model.named_parameters())  # once: a gathered layer has others
        self.go_by(self.config)
        self.step = 0
        self.checks: list[Callable[[], object]] = []
        """Called on all ranks before the gradients of a step or an evaluation are used, but not in replayed steps."""
        self.compiled = compiled
        if compiled and config.stages:
            # A graph of several lengths depends on which came first, which differs in a run that resumes
            limits = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
            limits.recompile_limit = max(limits.recompile_limit, MAX_VARIANTS)
            ranks.compile(model, dynamic=False)
        elif compiled:
            ranks.compile(model)
        self.frozen: list[Tensor] = []
        """What would learn, but waits in a stage of indexers."""
        self._kind = ""
        self.enter(0)

    def go_by(self, config: TrainConfig) -> None:
        """Continue with another config, from the present parameters, with a new optimizer."""
        self.config = config
        self.optimizer = build_optimizer(self.model, config, capturable=self.cuda_graph)
        self._drawn: Drawn | None = None
        # Anew, as a graph updates the moments of one optimizer
        self._take_step: Callable[..., Tensor] = Graphed(self._learn) if self.cuda_graph else self._learn

    def enter(self, step: int) -> None:
        """Attend as a step does, and let what learns in its stage get gradients."""
        kind = self.config.kind(step)
        if kind == self._kind:
            return
        if self.config.dense_stages:
            self.model.attend_densely(None if kind == "joint" else ("slc",))
        for parameter in self.frozen:
            parameter.requires_grad_()
        others = self._others() if kind == "indexers" else []
        self.frozen = [parameter.requires_grad_(False) for parameter in others if parameter.requires_grad]
        self._kind, self._is_settled = kind, False
        self._forward = self.ranks.wrap(self.model, some_unused=kind == "dense")
        # Anew, as a graph attends in one way, and the next stage may have equally long sequences
        self._take_step = Graphed(self._learn) if self.cuda_graph else self._learn

    def configs(self) -> dict[str, Any]:
        """Return the configs that decide the results of the run, as plain values."""
        # The corpus first: another tokenizer also makes another model.
        corpus = self.corpus.fingerprints()
        return {"corpus": corpus, "model": self.model.config.to_dict(), "training": asdict(self.config)}

    def train_step(self) -> StepResult:
        """Take one optimizer step.

        Raises:
            FloatingPointError: loss or gradient is not finite; the parameters are unchanged.
        """
        ranks = self.ranks
        self.enter(self.step)
        if self._drawn is None or self._drawn.step != self.step:
            self._drawn = self._draw(self.step)
        drawn = self._drawn
        self.model.train()
        if not self._is_settled:
            first = drawn.batch[: self.config.at(self.step).batch_size]
            ranks.settle(lambda: self._backward(first, self._teaching(drawn.number), 0, drawn.num_targets))
            self.optimizer.zero_grad()
            self._is_settled = True
        lr = self.config.learning_rate(self.step)
        set_learning_rate(self.optimizer, lr)
        numbers = self._take_step(drawn.number, drawn.num_targets, *drawn.batch.tensors())
        self._drawn = self._draw(self.step + 1)
        loss, grad_norm, *of_indexers = numbers.flatten().tolist()  # the only wait for the device
        result = StepResult(self.step, loss, lr, grad_norm, *of_indexers, dense=self._kind != "joint" or None)
        result.require_finite()
        self.step += 1
        return result

    def _learn(self, number: Tensor, num_targets: Tensor, *batch: Tensor) -> Tensor:
        """Take a step from this rank's sequences; return its numbers, as of :meth:`_finish`."""
        parts = Batch(*batch).split(self.config.at(self.step).batch_size)
        own_loss, teaching = torch.zeros((), device=self.device), self._teaching(number)
        for index, part in enumerate(parts):
            with self.ranks.part(self._forward, last=index == len(parts) - 1):
                own_loss += self._backward(part, teaching, index * len(parts[0]), num_targets)
        self._check()
        numbers = self._finish(teaching, own_loss)
        self._update(numbers)
        return numbers

    def _finish(self, teaching: Teaching, own_loss: Tensor) -> Tensor:
        """Clip the gradients, of indexers apart; return loss and norm of both, fp64 ``(2, 2)``, or ``(1, 2)``."""
        norms = [self._clip(self._others())]
        losses = teaching.finish(self.ranks, own_loss)
        norms += [self._clip(index_parameters(self.model))] if teaching.indexers else []
        return torch.stack((losses, torch.stack(norms)), dim=1)

    def _others(self) -> list[nn.Parameter]:
        """List the parameters that are not of indexers."""
        apart = set(index_parameters(self.model))
        return [parameter for parameter in self.parameters.values() if parameter not in apart]

    def _clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Clip the gradient of some parameters; return its norm before, fp64."""
        if all(parameter.grad is None for parameter in parameters):  # its norm would come from the host
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return whole(nn.utils.clip_grad_norm_(parameters, self.config.clip)).double()

    def _update(self, numbers: Tensor) -> None:
        """Update the parameters; the device leaves them as they are if a number of the step is not finite."""
        unsafe = numbers.isfinite().all().logical_not().float()
        self.optimizer.found_inf = unsafe  # pyright: ignore[reportAttributeAccessIssue]  (fused optimizers read it)
        self.optimizer.step()
        del self.optimizer.found_inf  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.zero_grad()

    def _draw(self, step: int) -> Drawn:
        """Draw this rank's sequences of a step, and send them to the device."""
        config = self.config.at(step)
        if self.training_rows.seq_len != config.seq_len:
            self.training_rows = self.corpus.tokens("train").rows(config.seq_len, config.pack)
        batch = draw_step(self.training_rows, config, step)
        # Fills, unlike copies from the host, do not wait for the device
        number = torch.full((), step, device=self.device)
        num_targets = torch.full((), float(batch.num_targets()), device=self.device)
        return Drawn(step, batch[self.ranks.share(len(batch))].to(self.device), number, num_targets)

    def _teaching(self, number: Tensor) -> Teaching:
        """Return what collects the selection losses of a step, of this rank's share of the sequences."""
        share = self.ranks.share(self.config.at(self.step).sequences_per_step)
        ids = torch.arange(share.start, share.stop, device=self.device)
        weight, seed = self.config.selection_loss_weight, self.config.seed
        return Teaching(self.model, weight=weight, seed=seed, step=number, sequence_ids=ids, wait=self._kind == "dense")

    def _backward(self, part: Batch, teaching: Teaching, first: int, num_targets: Tensor) -> Tensor:
        """Run one forward and backward pass, of the rows from ``first``; return its share of the language loss."""
        selection = teaching.selection(slice(first, first + len(part)))
        # The mean over the targets of all ranks, whose gradients are averaged
        loss = self.loss(part, selection) / num_targets
        ((loss + teaching.summed(selection)) * self.ranks.world_size).backward()
        return loss.detach()

    def loss(self, batch: Batch, selection: SelectionLoss | None = None) -> Tensor:
        """Return the cross-entropy, in nats, summed over this rank's targets; ``selection`` gets those of indexers."""
        local_rows = batch.map(self.ranks.cut)
        return language_loss(self._forward, local_rows, self.config.precision, reduction="sum", selection=selection)

    @torch.no_grad()
    def validation_bits_per_byte(self) -> float:
        """Evaluate on the validation text, always on the same sequences, which attend as in the last step."""
        self.enter(max(0, self.step - 1))
        self.model.eval()
        batch = self.validation_rows.spread(self.config.eval_sequences)
        local_rows = batch[self.ranks.share(len(batch))]
        nats = sum(self.loss(part.to(self.device)).item() for part in local_rows.split(self.config.batch_size))
        self._check()
        return self.ranks.total(nats) / self.validation_bytes / math.log(2)

    def _check(self) -> None:
        for check in self.checks:
            check()


def draw_step(rows: PackedDocuments | Windows, config: TrainConfig, step: int) -> Batch:
    """Draw the sequences of a step, as a function of seed and step alone.

    So the data have no state to resume, and ranks need not communicate what they have drawn.
    """
    return rows.draw(random.Random(f"{config.seed}/{step}"), config.sequences_per_step)


def language_loss(
    model: nn.Module, batch: Batch, precision: str, reduction: str = "mean", selection: SelectionLoss | None = None
) -> Tensor:
    """Return the cross-entropy, in nats, of predicting each target from the tokens before it."""
    extra = {} if selection is None else {"selection": selection}
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=precision == "bf16"):
        return model(batch.tokens, targets=batch.targets, reduction=reduction, document_ids=batch.document_ids, **extra)


def build_optimizer(model: nn.Module, config: TrainConfig, *, capturable: bool = False) -> torch.optim.AdamW:
    """Return AdamW for a run; each group has the factor of :func:`set_learning_rate` as ``relative_lr``.

    A CUDA graph can have the steps of a ``capturable`` one.
    """
    slower = COMPRESSOR_LR if config.compressor_lr is None else config.compressor_lr
    rates = {"compressor_lr": slower, "indexer_lr": config.indexer_lr}
    groups = parameter_groups(model, lr=1.0, weight_decay=config.weight_decay, **rates)
    for group in groups:
        group["relative_lr"] = group.pop("lr")
        if capturable:
            group["lr"] = torch.zeros((), device=group["params"][0].device)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True, capturable=capturable)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of a step; that of each group is relative to it."""
    for group in optimizer.param_groups:
        relative = lr * group["relative_lr"]
        group["lr"] = group["lr"].fill_(relative) if isinstance(group["lr"], Tensor) else relative
