"""``python -m flexnsa train``: train a language model on text; a stopped run resumes exactly."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from flexnsa.checks.primitives import check_positive_int
from flexnsa.lm.cli.options import add_stages_option, output_folder
from flexnsa.lm.cli.recipe_options import (
    add_recipe_options,
    model_config,
    preset_of_options,
    recipe_of_options,
    train_config,
)
from flexnsa.lm.data.corpus import Corpus
from flexnsa.lm.diagnosis.environment import recorded_environment
from flexnsa.lm.diagnosis.non_finite import strict
from flexnsa.lm.diagnosis.recipe import Recipe
from flexnsa.lm.diagnosis.stacks import stacks_on_request
from flexnsa.lm.diagnosis.watchdog import watchdog
from flexnsa.lm.model.config import DecoderConfig
from flexnsa.lm.parallel.joining import (
    PARALLEL,
    REDUCE_DTYPES,
    count_launched,
    launched_world_size,
    refused_together,
)
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.config import TrainConfig
from flexnsa.lm.training.run import Watcher, require_one_run, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; sizes that are not given come from the preset."""
    parser.add_argument("--out", type=output_folder, default="runs/train", help="folder of the log and the checkpoint")
    add_recipe_options(parser)
    add_stages_option(parser)
    parser.add_argument(
        "--strict", action="store_true", help="find the first value that is not finite, and name its layer; slower"
    )
    parser.add_argument(
        "--watchdog",
        type=float,
        metavar="SECONDS",
        help="after so long without a step write stacks, name the process that others wait for, and exit with 75",
    )
    _add_process_options(parser)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Train, from the checkpoint in ``--out`` if there is one."""
    joining = {
        "parallel": arguments.parallel,
        "reduce_dtype": arguments.reduce_dtype or "fp32",
        "context_parallel": arguments.context_parallel,
    }
    with refused_together(**joining):
        recipe = recipe_of_options(arguments, arguments.out, leave_out=arguments.out, **joining)
        watchers = _watchers(arguments)
        recipe = replace(recipe, ranks=_count_processes(arguments))
        recipe.own_device()
        recipe.check_training()
    # What a checkpoint says is compared later: ranks that see different folders are told of these.
    same = agreed_options(arguments, model_config(arguments), train_config(arguments), recipe.corpus())
    with recipe.joined(same) as ranks:
        stopped_by = _train(recipe, ranks, arguments, watchers)
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)


def _train(recipe: Recipe, ranks: Ranks, arguments: argparse.Namespace, watchers: Sequence[Watcher]) -> int | None:
    """Train in a function of its own: the wrapped model has to be gone before the ranks part."""
    require_one_run(arguments.out, ranks)
    trainer = recipe.build_trainer(ranks)
    if ranks.rank == 0:
        corpus = trainer.corpus
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"{size:,} parameters; {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate")
        if corpus.tokenized is not None:
            print(f"{len(corpus.tokenized.train.ids):,} tokens to train on, of {recipe.model.vocab_size:,}")
    return run(trainer, arguments.out, log_ranks=arguments.log_ranks, watchers=watchers)


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes, started by torchrun")
    group.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="what each process holds: ddp, the whole model; fsdp2, a shard of each parameter",
    )
    group.add_argument(
        "--reduce-dtype",
        choices=REDUCE_DTYPES,
        help="dtype in which gradients are summed over processes; default: fp32",
    )
    group.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="R",
        help="number of processes that share the tokens of the same sequences; default: %(default)s",
    )
    group.add_argument("--log-ranks", action="store_true", help="write a log of every process, log.rank-<r>.jsonl")


def _watchers(arguments: argparse.Namespace) -> list[Watcher]:
    """Return the watchers that the options name.

    Raises:
        ValueError: an option is out of range, or does not fit another.
    """
    if arguments.strict and arguments.context_parallel > 1:
        raise ValueError("strict: expected no --context-parallel with it, as no process has a whole sequence, got both")
    if arguments.strict and arguments.compile:
        raise ValueError("strict: expected no --compile with it, because hooks skip compiled code, got both")
    watchers: list[Watcher] = [recorded_environment, stacks_on_request]
    watchers += [strict] if arguments.strict else []
    return watchers + ([watchdog(arguments.watchdog)] if arguments.watchdog is not None else [])


def _count_processes(arguments: argparse.Namespace) -> int:
    """Return the number of processes that train together.

    Raises:
        ValueError: they were not started as the options say.
    """
    sharing = arguments.context_parallel
    check_positive_int("context_parallel", sharing)
    if arguments.parallel is not None:
        world_size = launched_world_size()
        if world_size % sharing:
            raise ValueError(f"context_parallel: expected a divisor of the {world_size} processes, got {sharing}")
        return world_size
    options = {"reduce_dtype": arguments.reduce_dtype, "log_ranks": arguments.log_ranks}
    for name, value in (options | {"context_parallel": sharing > 1}).items():
        if value:
            raise ValueError(f"{name}: expected --parallel with it, got none")
    if count_launched() > 1:
        raise ValueError(f"parallel: expected a way for the {count_launched()} processes of torchrun, got none")
    return 1


MAY_DIFFER = {
    "device": "each process takes a GPU of its own; the kind of device is compared when they join",
    "out": "machines may name the shared folder differently; that it is one folder is checked when the run starts",
    "log_ranks": "no process waits for the log of another",
}
"""Options that may differ between processes, and why."""


def agreed_options(
    arguments: argparse.Namespace, model: DecoderConfig, training: TrainConfig, corpus: Corpus
) -> dict[str, Any]:
    """Return the values that all processes have to agree on, by option, besides those that join them.

    Texts and tokenizers are compared by content, because their paths may differ between machines.
    """
    content = corpus.fingerprints()
    return {
        "preset": preset_of_options(arguments),
        "text": f"{len(corpus.train) + len(corpus.validation):,} bytes of sha256 {content['text_sha256'][:16]}",
        "tokenizer": content.get("tokenizer_sha256"),
        "compile": arguments.compile,
        "strict": arguments.strict,
        "watchdog": arguments.watchdog,
        "model": model.to_dict(),
        "training": asdict(training),
    }
