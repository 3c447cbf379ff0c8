"""The options of commands that try something in processes of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from flexnsa.cli.diagnose.showing import add_json_option, show
from flexnsa.cli.options import output_folder, require
from flexnsa.cli.recipe_options import add_recipe_options, model_config, train_config
from flexnsa.diagnostics.cases import Outcome
from flexnsa.diagnostics.recipe import Recipe
from flexnsa.distributed import PARALLEL
from flexnsa.validation import check_positive_number

_OF_RUNS = ("steps", "eval_every", "checkpoint_every")
"""Of training, and without a meaning in a case."""


def add_case_options(parser: argparse.ArgumentParser, name: str, *, seconds: float, parallel: bool = True) -> None:
    """Declare those that every such command takes, and what is trained.

    Args:
        parser: of the command.
        name: of the command, and of its folder.
        seconds: default of the time limit.
        parallel: whether ranks can be parallel in more than one way.
    """
    parser.add_argument(
        "--out",
        type=output_folder,
        default=f"runs/diagnose/{name}",
        help="folder of logs and stacks; default: %(default)s",
    )
    parser.add_argument(
        "--limit", type=float, default=seconds, metavar="SECONDS", help="for each case; default: %(default)g"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine; default: %(default)s")
    if parallel:
        parser.add_argument(
            "--parallel", choices=PARALLEL, help="what each of them holds; default: ddp for more than one"
        )
    add_json_option(parser)
    add_recipe_options(parser, skip=_OF_RUNS)


def recipe_of(arguments: argparse.Namespace, **training: Any) -> Recipe:
    """Give what the options name, of hyper-parameters that may differ.

    Raises:
        ValueError: an option is out of range, or does not fit another.
    """
    require("numpy", "safetensors", "tqdm", extra="train")
    check_positive_number("limit", arguments.limit)
    parallel = getattr(arguments, "parallel", "ddp") or ("ddp" if arguments.ranks > 1 else None)
    recipe = Recipe(
        model=model_config(arguments),
        training=replace(train_config(arguments), **training),
        text=arguments.text,
        tokenizer=arguments.tokenizer,
        device=str(arguments.device),
        compiled=arguments.compile,
        parallel=parallel,
        ranks=arguments.ranks,
    )
    recipe.check()
    return recipe


def show_outcome(
    arguments: argparse.Namespace,
    outcome: Outcome,
    sentence: Callable[[dict[str, Any]], str],
    table: Callable[[dict[str, Any]], str],
    is_good: Callable[[dict[str, Any]], bool],
) -> None:
    """Show what a single case gave, or why it gave nothing."""
    record = outcome.values
    if not outcome.passed:
        show(arguments, f"{outcome.status}: {outcome.reason} (see {arguments.out}).", "", asdict(outcome), good=False)
    show(arguments, sentence(record), table(record), record, good=is_good(record))
