"""Four steps of a small model, on as many ranks as there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flexnsa.distributed import Ranks, joined_ranks
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import Corpus, TrainConfig, Trainer
from tests.support.inputs import TINY

CPU = torch.device("cpu")
MODEL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=TINY)
TRAINING = TrainConfig(steps=4, batch_size=4, seq_len=48, warmup_steps=1, eval_sequences=4, clip=0.5)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"pack": True},
    "accumulated": {"batch_size": 1, "grad_accumulation": 8, "pack": True},
    "checkpointed": {"checkpointing": True, "pack": True},
}


def corpus() -> Corpus:
    """Give words of random letters, in paragraphs of very different lengths."""
    draws = torch.Generator().manual_seed(1)
    text = torch.randint(97, 123, (6000,), generator=draws).to(torch.uint8)
    for start in (0, 1, 190, 191):
        text[start::37] = 10
    return Corpus(text, text[:2000].clone())


def train(ranks: Ranks, options: dict[str, Any]) -> dict[str, Any]:
    """Give the records of the steps, the validation loss and the parameters after them."""
    fields = dict(options)
    model = replace(MODEL, **{name: fields.pop(name) for name in ("checkpointing", "impl") if name in fields})
    config = replace(TRAINING, **fields)

    def make() -> DecoderLM:
        torch.manual_seed(config.seed)
        return DecoderLM(model)

    trainer = Trainer(ranks.build(make, CPU), corpus(), config, ranks=ranks)
    steps = [trainer.train_step() for _ in range(config.steps)]
    bits = trainer.validation_bits_per_byte()
    state = {name: _whole(value).clone() for name, value in trainer.model.state_dict().items()}
    return {"steps": steps, "bits": bits, "parameters": state}


def train_cases(parallel: str, cases: dict[str, dict[str, Any]], file: Path, reduce_dtype: str = "fp32") -> None:
    """Train in each way, and save what rank 0 has seen."""
    with joined_ranks(parallel, CPU, reduce_dtype) as ranks:
        results = {name: train(ranks, options) for name, options in cases.items()}
        if ranks.rank == 0:
            torch.save(results, file)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
