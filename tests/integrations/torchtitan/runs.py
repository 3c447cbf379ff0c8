"""Runs of torchtitan's own trainer in processes that see torchrun's variables, and what they log of their steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.torchtitan import without_gpu  # noqa: F401  (before torchtitan is imported)

# isort: split
from torchtitan import trainer as trainer_module
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

CONFIGS = "tests.integrations.torchtitan.configs"
LOSS, SELECTION_LOSS, NORM = "loss_metrics/global_avg_loss", "loss_metrics/selection_loss", "grad_norm"
TOLD = "step and number of sequences that layers were told"
FEW: dict[str, Any] = {
    "select_block_size": 16,
    "compress_block_size": 8,
    "compress_stride": 4,
    "num_selected_blocks": 4,
    "window_size": 16,
}
"""Of a row of 128 tokens a query sees half, and chooses one block of those that are not forced."""
INDEXER: dict[str, Any] = {**FEW, "index_heads": 1, "index_block_size": 4, "index_stride": 4, "num_queries": 32}

# The trainer sleeps for two seconds at its end.
trainer_module.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)  # pyright: ignore


class Steps(BaseLogger):
    """Keeps what is logged of each step."""

    def __init__(self, trainer: Trainer) -> None:
        self.processor: Any = trainer.metrics_processor
        self.steps: dict[int, dict[str, Any]] = {}

    def log(self, metrics: dict[str, Any], step: int) -> None:
        own = self.processor
        told = {TOLD: [int(own.step), own.sequences]} if hasattr(own, "sequences") else {}
        self.steps[step] = metrics | told

    def results(self) -> dict[str, list[Any]]:
        """Give the losses and gradient norms of all steps."""
        every, names = list(self.steps.values()), (LOSS, SELECTION_LOSS, NORM, TOLD)
        return {name: [step[name] for step in every] for name in names if name in every[0]}


def override(**options: Any) -> str:
    """Give the argument that makes the layers of a run NSA."""
    return f"--override.imports={target(**options)}"


def target(**options: Any) -> str:
    """Give the name of the override, with options."""
    return f"flexnsa.torchtitan.native_sparse_attention={json.dumps(options)}"


def config_of(name: str, folder: Path, *arguments: str) -> Trainer.Config:
    """Parse a command line of torchtitan."""
    given = ["--module", CONFIGS, "--config", name, "--dump_folder", str(folder), *arguments]
    config = ConfigManager().parse_args(given)
    assert isinstance(config, Trainer.Config)
    return config


@contextmanager
def trainer_of(name: str, folder: Path, *arguments: str) -> Any:
    """Build a trainer, and what keeps its steps; its process group stays for the next."""
    trainer = config_of(name, folder, *arguments).build()
    trainer.metrics_processor.logger = steps = Steps(trainer)
    yield trainer, steps
    trainer.close()


def train(name: str, folder: Path, *arguments: str) -> dict[str, list[Any]]:
    """Run to the end, and give what was logged."""
    with trainer_of(name, folder, *arguments) as (trainer, steps):
        trainer.train()
    return steps.results()


def save_results(file: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    """Save what ``make(folder)`` returns on the last rank, which has the losses of pipelines too."""
    results = make(file.parent)
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save(results, file)
    dist.barrier()  # gloo aborts a process that leaves before another does
    dist.destroy_process_group()
