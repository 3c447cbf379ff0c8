"""``python -m flexnsa train``: a language model on text, resumed exactly if it was stopped."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from flexnsa.cli.options import output_folder, require
from flexnsa.cli.recipe_options import add_recipe_options, model_config, text_tokenizer, train_config
from flexnsa.diagnostics import recorded_environment, stacks_on_request, strict, watchdog
from flexnsa.distributed import PARALLEL, REDUCE_DTYPES, Ranks, joined_ranks, launched_world_size, rank_device
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import Corpus, TrainConfig, Trainer, Watcher, read_corpus, run
from flexnsa.training.trainer import check_training
from flexnsa.validation import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; sizes that are not given come from the preset."""
    parser.add_argument("--out", type=output_folder, default="runs/train", help="folder of the log and the checkpoint")
    add_recipe_options(parser)
    parser.add_argument(
        "--strict", action="store_true", help="look for the first non-finite value and name its place; slower"
    )
    parser.add_argument(
        "--watchdog",
        type=float,
        metavar="SECONDS",
        help="no step for so long: write stacks, say which process holds up the others, and leave with status 75",
    )
    _add_process_options(parser)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Train, from the checkpoint in ``--out`` if there is one."""
    require("numpy", "safetensors", "tqdm", extra="train")
    model, training = model_config(arguments), train_config(arguments)
    watchers = _watchers(arguments)
    world_size, device = _launched(arguments)
    corpus = read_corpus(arguments.text, text_tokenizer(arguments))
    sharing = arguments.context_parallel
    check_training(model, corpus, training, device, world_size, sharing)  # before processes wait for each other

    with joined_ranks(arguments.parallel, device, arguments.reduce_dtype or "fp32", sharing) as ranks:
        stopped_by = _train(arguments, model, training, corpus, device, ranks, watchers)
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)


def _train(
    arguments: argparse.Namespace,
    model_config: DecoderConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    device: torch.device,
    ranks: Ranks,
    watchers: Sequence[Watcher],
) -> int | None:
    def make() -> DecoderLM:
        torch.manual_seed(train_config.seed)
        return DecoderLM(model_config)

    model = ranks.build(make, device)
    trainer = Trainer(model, corpus, train_config, compiled=arguments.compile, ranks=ranks)
    if ranks.rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size:,} parameters; {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate")
        if corpus.tokenized is not None:
            print(f"{len(corpus.tokenized.train.ids):,} tokens to train on, of {model_config.vocab_size:,}")
    return run(trainer, arguments.out, log_ranks=arguments.log_ranks, watchers=watchers)


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes, started by torchrun")
    group.add_argument(
        "--parallel",
        choices=PARALLEL,
        help="what each process holds: ddp, the whole model; fsdp2, a shard of each parameter",
    )
    group.add_argument(
        "--reduce-dtype", choices=REDUCE_DTYPES, help="in which gradients are summed over processes; default: fp32"
    )
    group.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="R",
        help="so many processes share the tokens of the same sequences; default: %(default)s",
    )
    group.add_argument("--log-ranks", action="store_true", help="a log of every process, log.rank-<r>.jsonl")


def _watchers(arguments: argparse.Namespace) -> list[Watcher]:
    """Give what looks on.

    Raises:
        ValueError: an option is out of range, or has no place beside another.
    """
    if arguments.strict and arguments.context_parallel > 1:
        raise ValueError("strict: expected no --context-parallel with it, where no process has a whole row, got both")
    if arguments.strict and arguments.compile:
        raise ValueError("strict: expected no --compile with it, whose code has no place to look at, got both")
    watchers: list[Watcher] = [recorded_environment, stacks_on_request]
    watchers += [strict] if arguments.strict else []
    return watchers + ([watchdog(arguments.watchdog)] if arguments.watchdog is not None else [])


def _launched(arguments: argparse.Namespace) -> tuple[int, torch.device]:
    """Give the number of processes, and the device of this one."""
    sharing = arguments.context_parallel
    check_positive_int("context_parallel", sharing)
    if arguments.parallel is not None:
        world_size = launched_world_size()
        if world_size % sharing:
            raise ValueError(f"context_parallel: expected a divisor of the {world_size} processes, got {sharing}")
        return world_size, rank_device(arguments.device)
    options = {"reduce_dtype": arguments.reduce_dtype, "log_ranks": arguments.log_ranks}
    for name, value in (options | {"context_parallel": sharing > 1}).items():
        if value:
            raise ValueError(f"{name}: expected --parallel with it, got none")
    return 1, arguments.device
