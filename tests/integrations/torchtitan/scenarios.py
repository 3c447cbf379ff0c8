"""Runs that are the same however many ranks share them, however their layers run, and if they are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.integrations.torchtitan.runs import INDEXER, LOSS, override, save_results, target, train, trainer_of
from tests.integrations.torchtitan.without_gpu import IS_OLD


class Scenario(NamedTuple):
    """A run on so many ranks, with arguments that change nothing, ``apart`` if it needs processes of its own."""

    ranks: int
    arguments: tuple[str, ...]
    like: str = "packed"
    apart: bool = False


def degree(**degrees: int) -> tuple[str, ...]:
    """Give the arguments that set degrees of parallelism."""
    return tuple(f"--parallelism.{kind}_parallel_degree={degree}" for kind, degree in degrees.items())


def rows(count: int) -> tuple[str, ...]:
    """Give the argument that sets the rows of a rank."""
    return (f"--training.local_batch_size={count}",)


PIPELINE = "--parallelism.pipeline_parallel_schedule"
COMPILED = ("--compile.enable", "--compile.backend=aot_eager", "--compile.components=model")

TWO = {**INDEXER, "num_selected_blocks": 2, "num_init_blocks": 0, "num_local_blocks": 1}
"""Of a row of 48 tokens, which are three blocks, a query chooses one besides its own."""

CHOSEN = target(**INDEXER, layers=["layers.[13].*"])

ALONE: dict[str, tuple[str, ...]] = {
    "packed": ("llama", "--training.steps=4", "--dataloader.documents=3", override(**INDEXER)),
    "whole rows": ("llama", "--training.steps=4", override(**INDEXER, packed=False, share_index=[0, 1, 0, 3])),
    "norms": ("qwen3", "--training.steps=4", "--dataloader.documents=3", override(**INDEXER)),
    "chosen": (
        "llama",
        "--training.steps=4",
        "--override.imports",
        CHOSEN,
        "tests.integrations.torchtitan.others.halve",
    ),
    "debug": ("debug_llama", "--training.steps=8", "--training.seq_len=48", override(**TWO)),
}
"""What one process runs."""

TYPED: dict[str, Scenario] = {
    f"types, {name}": Scenario(ranks, ("--parallelism.spmd_backend=spmd_types", *arguments), apart=True)
    for name, (ranks, arguments) in {
        "FSDP2": (2, rows(2)),
        "tensor parallel": (2, degree(tensor=2)),
        "pipeline": (2, (*degree(pipeline=2), f"{PIPELINE}=1F1B")),
        "FSDP2 and tensor parallel": (4, (*rows(2), *degree(tensor=2))),
    }.items()
}
"""On torchtitan's default backend, which shares parameters among ranks with a newer PyTorch than 2.13 alone."""

SAME: dict[str, Scenario] = {
    "debug, FSDP2": Scenario(2, rows(2), "debug"),
    "debug, tensor parallel": Scenario(2, degree(tensor=2), "debug"),
    "norms, tensor parallel": Scenario(2, (*degree(tensor=2), "--parallelism.no-enable-sequence-parallel"), "norms"),
    "replicated": Scenario(2, (*rows(2), "--parallelism.data_parallel_replicate_degree=2")),
    "context parallel": Scenario(2, degree(context=2)),
    "pipeline": Scenario(2, (*degree(pipeline=2), f"{PIPELINE}=1F1B")),
    "stages without NSA": Scenario(2, (*degree(pipeline=2), f"{PIPELINE}=Interleaved1F1B"), "chosen"),
    "FSDP2 and tensor parallel": Scenario(4, (*rows(2), *degree(tensor=2))),
    "context and tensor parallel": Scenario(4, degree(context=2, tensor=2), "whole rows"),
    "accumulated": Scenario(1, (*rows(1), "--training.global_batch_size=4")),
    "checkpointed": Scenario(1, ("activation-checkpoint:selective",)),
    "recomputed": Scenario(1, ("activation-checkpoint:full",)),
    "compiled and checkpointed": Scenario(1, (*COMPILED, "activation-checkpoint:selective")),
    "shared index, FSDP2": Scenario(2, rows(2), "whole rows"),
    "shared index, recomputed": Scenario(1, ("activation-checkpoint:full",), "whole rows"),
    "shared index, compiled": Scenario(1, (*COMPILED, "activation-checkpoint:selective"), "whole rows"),
    **({} if IS_OLD else TYPED),
}
"""What has to log the same as the run that each is ``like``."""


def run_alone(file: Path, name: str) -> None:
    """Save what one process logs."""
    save_results(file, lambda folder: train(ALONE[name][0], folder / name, *ALONE[name][1:]))


def run_shared(file: Path, ranks: int) -> None:
    """Save what so many ranks log, of all scenarios for them."""
    own = {name: scenario for name, scenario in SAME.items() if scenario.ranks == ranks and not scenario.apart}
    save_results(file, lambda folder: {name: _run(scenario, folder / name) for name, scenario in own.items()})


def run_apart(file: Path, name: str) -> None:
    """Save what the ranks of one scenario log."""
    save_results(file, lambda folder: _run(SAME[name], folder / "run"))


def _run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    config, *arguments = ALONE[scenario.like]
    return train(config, folder, *arguments, *scenario.arguments)


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


def teach(file: Path) -> None:
    """Save the names of all weights, and of those that a warm-up of indexers and what follows it in its folder move.

    The losses are the first of the warm-up, and of a run that selects all blocks.
    """

    def stage(folder: Path, steps: int, **options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
        kept = ("--checkpoint.enable", "--checkpoint.no_last_save_model_only", "--lr_scheduler.total_steps=4")
        options = INDEXER | {"share_index": [0, 1, 0, 3]} | options
        arguments = (*kept, *rows(2), f"--training.steps={steps}", override(**options))
        with trainer_of("llama", folder, *arguments) as (trainer, logged):
            seen: list[dict[str, Tensor]] = []
            for go_on in (lambda: None, trainer.train):
                go_on()
                seen.append({name: x.full_tensor() for name, x in trainer.model_parts[0].named_parameters()})
        return seen[0], seen[1], logged.results()[LOSS][0]

    def stages(folder: Path) -> dict[str, Any]:
        start, warm, loss = stage(folder / "taught", 2, warmup=True)
        _, end, _ = stage(folder / "taught", 4)
        *_, loss_of_all = stage(folder / "all", 1, num_selected_blocks=8)
        moved = [{name for name in end if not torch.equal(x[name], y[name])} for x, y in ((start, warm), (warm, end))]
        return {"warm-up": moved[0], "joint": moved[1], "all": set(end), "losses": (loss, loss_of_all)}

    save_results(file, stages)


def go_on(file: Path, ranks: int, checkpoints: Path) -> None:
    """Save what the steps after the checkpoint log."""
    own = (f"--checkpoint.folder={checkpoints}", f"--checkpoint.load_step={SAVED}", "--checkpoint.load_only")
    rows = f"--training.local_batch_size={4 // ranks}"
    save_results(file, lambda folder: train("llama", folder / "resumed", *ARGUMENTS, *own, rows))
