"""Train a small model on text with transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, TrainingArguments

from flexnsa.lm import parameter_groups
from flexnsa.transformers import UpTraining
from tests.integrations.transformers.families import FEW, converted, own, sparse

ROW = 48
MODELS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW, vocab_size=128),
    "own": lambda: own(vocab_size=128),
    "converted": lambda: converted("qwen3", FEW, vocab_size=128),
}


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of the bytes of this folder's first file."""

    def __init__(self) -> None:
        text = Path(__file__).with_name("families.py").read_bytes()
        rows = [list(text[start : start + ROW]) for start in range(0, len(text) - ROW, ROW)]
        self.rows = torch.tensor(rows).clamp_max(127)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def trainer(name: str, out: Path, *, steps: int, batch: int = 8, schedule: bool = False, **options: Any) -> Any:
    """Set up training of a model in float32."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    callbacks: Any = [UpTraining(opening_steps=4, frozen_steps=2)] if schedule else []
    model = MODELS[name]().float()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=arguments.learning_rate))
    return Trainer(model=model, args=arguments, train_dataset=Text(), callbacks=callbacks, optimizers=(optimizer, None))


def losses(run: Trainer) -> list[float]:
    """Give the loss of every step."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def train_together(out: Path) -> None:
    """Take three steps in processes that see torchrun's variables, and save what they give."""
    run = trainer("converted", out, steps=3, batch=4)
    run.train()
    run.save_model(str(out))
    dist.barrier()  # gloo aborts a process that leaves before the other does
