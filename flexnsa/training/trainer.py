"""One training step, and the state that it moves on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexnsa.models import DecoderLM
from flexnsa.training.config import TrainConfig
from flexnsa.training.data import Corpus


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
        model: byte-level model, on the device to train on.
        corpus: text to train and validate on.
        config: hyper-parameters.
        compiled: run the model through ``torch.compile``.

    Raises:
        ValueError: the text is shorter than a sequence.
    """

    def __init__(self, model: DecoderLM, corpus: Corpus, config: TrainConfig, *, compiled: bool = False) -> None:
        corpus.require_windows(config.seq_len)
        self.model, self.corpus, self.config = model, corpus, config
        self.device = model.embedding.weight.device
        self.optimizer = build_optimizer(model, config)
        self.step = 0
        self._forward: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model

    def configs(self) -> dict[str, Any]:
        """Give what decides the numbers of the run, as plain values."""
        text = {"text_sha256": self.corpus.sha256()}
        return {"model": self.model.config.to_dict(), "training": asdict(self.config), "corpus": text}

    def train_step(self) -> StepResult:
        """Take one optimizer step.

        Raises:
            FloatingPointError: loss or gradient is not finite; the parameters have not been touched.
        """
        config = self.config
        windows = self.corpus.batch(
            seed=config.seed,
            step=self.step,
            num_sequences=config.batch_size * config.grad_accumulation,
            seq_len=config.seq_len,
        )
        self.model.train()
        loss = torch.zeros((), device=self.device)
        for micro_batch in windows.to(self.device).chunk(config.grad_accumulation):
            part = self.loss(micro_batch) / config.grad_accumulation
            part.backward()
            loss += part.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        if not math.isfinite(loss.item() + grad_norm.item()):
            raise FloatingPointError(f"step {self.step}: loss {loss.item()}, gradient norm {grad_norm.item()}")
        lr = config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        result = StepResult(self.step, loss.item(), lr, grad_norm.item())
        self.step += 1
        return result

    def loss(self, windows: Tensor) -> Tensor:
        """Give the mean cross-entropy, in nats, of predicting each byte of ``(B, S + 1)`` windows from those before."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = self._forward(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def validation_bits_per_byte(self) -> float:
        """Evaluate on the validation text, always on the same windows."""
        self.model.eval()
        config = self.config
        batches = self.corpus.validation_batches(
            num_sequences=config.eval_sequences, seq_len=config.seq_len, batch_size=config.batch_size
        )
        nats = sum(self.loss(windows.to(self.device)).item() * len(windows) for windows in batches)
        return nats / config.eval_sequences / math.log(2)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Give AdamW that decays the matrices of linear maps, and neither embeddings nor vectors."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() >= 2 and p not in embeddings]
    plain = [p for p in model.parameters() if p.dim() < 2 or p in embeddings]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
