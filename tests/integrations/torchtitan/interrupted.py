"""A run that is killed, and goes on from its checkpoint on other numbers of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integrations.torchtitan.runs import INDEXER, override, save_results, train, trainer_of

ARGUMENTS = ("--training.steps=4", "--checkpoint.enable", override(**INDEXER, compression="mlp"))
SAVED = 2
"""Steps before the checkpoint."""


def start(folder: Path) -> None:
    """Save a checkpoint, and die in the step after the next, without a word to anyone."""
    own = (f"--checkpoint.interval={SAVED}", "--training.local_batch_size=2")
    with trainer_of("llama", folder, *ARGUMENTS, *own) as (trainer, _):
        step = trainer.train_step

        def die(batches: Iterator[Any]) -> None:
            if trainer.step == SAVED + 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(batches)

        trainer.train_step = die
        trainer.train()


def run_through(file: Path) -> None:
    """Save what the same run logs when nothing happens to it."""
    own = ("--checkpoint.load_only", "--training.local_batch_size=2")
    save_results(file, lambda folder: train("llama", folder / "through", *ARGUMENTS, *own))


def grow(file: Path) -> None:
    """Save what two starts in one folder log, of which the second has longer rows."""

    def stage(folder: Path, steps: int, length: int, rows: int) -> dict[str, Any]:
        own = f"--training.steps={steps} --training.seq_len={length} --training.local_batch_size={rows}".split()
        kept = ("--checkpoint.no_last_save_model_only", "--lr_scheduler.total_steps=4")
        return train("llama", folder, *ARGUMENTS, *kept, *own)

    save_results(file, lambda folder: {"first": stage(folder, 2, 64, 4), "second": stage(folder, 4, 128, 2)})


def go_on(file: Path, ranks: int, checkpoints: Path) -> None:
    """Save what the steps after the checkpoint log."""
    own = (f"--checkpoint.folder={checkpoints}", f"--checkpoint.load_step={SAVED}", "--checkpoint.load_only")
    rows = f"--training.local_batch_size={4 // ranks}"
    save_results(file, lambda folder: train("llama", folder / "resumed", *ARGUMENTS, *own, rows))
