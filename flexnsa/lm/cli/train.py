"""``python -m flexnsa train``: train a language model on text; a stopped run resumes exactly.

The options of the model, its training and the text are those of ``diagnose`` too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flexnsa.config import NSAConfig
from flexnsa.lm.cli.options import (
    add_checkpointing_option,
    add_config_options,
    add_device_option,
    add_stages_options,
    config_options,
    output_folder,
    require,
)
from flexnsa.lm.data.corpus import Corpus
from flexnsa.lm.data.tokenizer import TextTokenizer
from flexnsa.lm.diagnosis.environment import recorded_environment
from flexnsa.lm.diagnosis.non_finite import strict
from flexnsa.lm.diagnosis.recipe import Recipe, corpus
from flexnsa.lm.diagnosis.stacks import stacks_on_request
from flexnsa.lm.diagnosis.watchdog import watchdog
from flexnsa.lm.model.config import PRESETS, DecoderConfig, changed
from flexnsa.lm.parallel.joining import PARALLEL, REDUCE_DTYPES, count_launched, launched_world_size, refused_together
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.checkpoint import configs_of_run
from flexnsa.lm.training.checks import check_cuda_graph
from flexnsa.lm.training.config import TRAIN_PRESETS, TrainConfig
from flexnsa.lm.training.run import Watcher, require_one_run, run
from flexnsa.primitives import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; sizes that are not given come from the preset."""
    parser.add_argument("--out", type=output_folder, default="runs/train", help="folder of the log and the checkpoint")
    add_recipe_options(parser)
    add_stages_options(parser)
    parser.add_argument(
        "--cuda-graph", action="store_true", help="replay steps as one CUDA graph; faster where they have few tokens"
    )
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
        check_cuda_graph(arguments.cuda_graph, recipe.local_device(), recipe.ranks)
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
    trainer = recipe.build_trainer(ranks, cuda_graph=arguments.cuda_graph)
    if ranks.rank == 0:
        text = trainer.corpus
        size = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"{size:,} parameters; {len(text.train):,} bytes to train on, {len(text.validation):,} to validate")
        if text.tokenized is not None:
            print(f"{len(text.tokenized.train.ids):,} tokens to train on, of {recipe.model.vocab_size:,}")
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
    for option, given in {"--compile": arguments.compile, "--cuda-graph": arguments.cuda_graph}.items():
        if arguments.strict and given:
            raise ValueError(f"strict: expected no {option} with it, because what it runs skips hooks, got both")
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


def agreed_options(
    arguments: argparse.Namespace, model: DecoderConfig, training: TrainConfig, text: Corpus
) -> dict[str, Any]:
    """Return the values that all processes have to agree on, by option, besides those that join them.

    Texts and tokenizers are compared by content, because their paths may differ between machines. So may ``out``; that
    it is one folder is checked when the run starts. Each process has its own device, and its own ``log_ranks``.
    """
    content = text.fingerprints()
    return {
        "preset": preset_of_options(arguments),
        "text": f"{len(text.train) + len(text.validation):,} bytes of sha256 {content['text_sha256'][:16]}",
        "tokenizer": content.get("tokenizer_sha256"),
        "compile": arguments.compile,
        "cuda_graph": arguments.cuda_graph,
        "strict": arguments.strict,
        "watchdog": arguments.watchdog,
        "model": model.to_dict(),
        "training": asdict(training),
    }


def add_recipe_options(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Declare the options; sizes that are not given come from the preset.

    ``skip`` names fields of :class:`~flexnsa.lm.TrainConfig` that the command does not use, or names differently.
    """
    parser.add_argument("--text", type=Path, help="a text file or a folder; default: Python's standard library")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a file of Hugging Face tokenizers, or a folder with tokenizer.json; default: a token is a byte",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, help="sizes and hyper-parameters; default: text-125m on a GPU, text-small on a CPU"
    )
    add_device_option(parser)
    parser.add_argument("--compile", action="store_true", help="run the layers through torch.compile")
    add_checkpointing_option(parser)
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="fill sequences with whole documents, which blank lines separate (default: cut the text anywhere)",
    )
    add_config_options(parser, "model", DecoderConfig, skip=("nsa", "vocab_size", "checkpointing"))
    of_scores = ("index_head_dim", "index_score")
    add_config_options(parser, "branches of NSA, in tokens or blocks", NSAConfig, skip=of_scores)
    skip += ("pack", "stages", "dense_stages", "indexer_stages")
    add_config_options(parser, "training", TrainConfig, skip=skip)


def recipe_of_options(arguments: argparse.Namespace, resumed: Path | None = None, **fields: Any) -> Recipe:
    """Return what the options name, with other fields of the recipe.

    Args:
        arguments: of the command.
        resumed: the folder of a run, which says what is left open if there is one and no ``--preset``.
        **fields: fields of the recipe.

    Raises:
        FileError: the checkpoint of the run cannot be read.
        ValueError: an option is out of range, or does not fit another.
    """
    require("numpy", "safetensors", "tqdm", extra="train")
    run = configs_of_run(resumed) if resumed is not None and arguments.preset is None else None
    model, training = run or (None, None)
    corpus.cache_clear()  # the text may have changed since another command of this process
    return Recipe(
        model=model_config(arguments, model),
        training=train_config(arguments, training),
        text=arguments.text,
        tokenizer=arguments.tokenizer,
        device=str(arguments.device),
        compiled=arguments.compile,
        **fields,
    )


def model_config(arguments: argparse.Namespace, base: DecoderConfig | None = None) -> DecoderConfig:
    """Return the model that the options name; what they leave open is as in ``base``, or in the preset."""
    overrides = config_options(arguments, DecoderConfig, skip=("nsa",))
    if arguments.tokenizer is not None:
        require("tokenizers", extra="hf")
        overrides["vocab_size"] = TextTokenizer(arguments.tokenizer).vocab_size
    config = changed(base or PRESETS[preset_of_options(arguments)], **overrides)
    return replace(config, nsa=replace(config.nsa, **config_options(arguments, NSAConfig)))


def preset_of_options(arguments: argparse.Namespace) -> str:
    """Return the preset that the options name, or that of the device."""
    return arguments.preset or ("text-125m" if torch.device(arguments.device).type == "cuda" else "text-small")


def train_config(arguments: argparse.Namespace, base: TrainConfig | None = None) -> TrainConfig:
    """Return the hyper-parameters that the options name; what they leave open is as in ``base``, or in the preset."""
    options = config_options(arguments, TrainConfig)
    if "stages" in options:
        options = {"seq_len": options["stages"][-1][0]} | options
    return replace(base or TRAIN_PRESETS[preset_of_options(arguments)], **options)
