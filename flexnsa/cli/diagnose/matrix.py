"""``python -m flexnsa diagnose matrix``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from flexnsa.cli.diagnose.cases import add_case_options, recipe_of
from flexnsa.cli.diagnose.showing import show
from flexnsa.config import NSAConfig
from flexnsa.diagnostics.cases import Outcome
from flexnsa.diagnostics.matrix import Point, run_matrix
from flexnsa.diagnostics.recipe import Recipe
from flexnsa.diagnostics.recipe_steps import take_steps
from flexnsa.models import DecoderConfig
from flexnsa.training import TrainConfig
from flexnsa.validation import check_positive_int

_LISTS = ("branches", "recompute")
_NOT_AXES = ("model", "training", "nsa", "text", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="what to vary, by the name of an option: branches=cmp+slc,win or seq_len=512,1024; takes the place of the "
        "axis of that name among branches, impl, checkpointing, precision and ranks, or comes beside them",
    )
    parser.add_argument("--steps", type=int, default=2, help="of each case; default: %(default)s")
    parser.add_argument("--retry", action="store_true", help="run again what did not pass in an earlier start")
    add_case_options(parser, "matrix", seconds=300)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Take steps in every combination, those of an earlier start excepted; status 1 unless all pass."""
    check_positive_int("steps", arguments.steps)
    recipe = recipe_of(arguments)
    axes = default_axes(recipe) | dict(map(_axis, arguments.axis))
    for name, values in axes.items():
        for value in values:
            recipe.at(**{name: value}).check()

    def run(point: Point, folder: Path) -> Outcome:
        return recipe.at(**point).run(folder, take_steps, arguments.steps, seconds=arguments.limit)

    about = recipe.record() | {"steps": arguments.steps}
    matrix = run_matrix(arguments.out, axes, run, about=about, retry=arguments.retry, report=_say)
    show(arguments, matrix.sentence(), matrix.table(), matrix.record(), good=matrix.passed)


def default_axes(recipe: Recipe) -> dict[str, Sequence[Any]]:
    """Vary what runs go wrong with: branches together and alone, what trains on the device, one rank and two."""
    cuda = torch.device(recipe.device).type == "cuda"
    ranks = [1, 2] if not cuda or torch.cuda.device_count() > 1 else [1]
    model = recipe.model
    alone = [(tag,) for tag in model.branches] if model.attention == "nsa" else []
    return {
        "branches": list(dict.fromkeys([model.branches, *alone])),
        "impl": ["flex", "triton"] if cuda else ["sdpa", "reference"],
        "checkpointing": ["none", "all"],
        "precision": ["fp32", "bf16"],
        "ranks": list(dict.fromkeys([*ranks, recipe.ranks])),
    }


def _axis(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    classes = (Recipe, DecoderConfig, NSAConfig, TrainConfig)
    kinds = {field.name: str(field.type) for config in classes for field in fields(config)}
    if name in _NOT_AXES or name not in kinds or not values:
        raise ValueError(f"axis: expected NAME=VALUE,VALUE with the name of an option, got {text!r}")
    try:
        return name, [_value(name, kinds[name], value) for value in values.split(",")]
    except ValueError as error:
        raise ValueError(f"axis: expected values of {name}, {kinds[name]}, got {values!r}") from error


def _value(name: str, kind: str, text: str) -> Any:
    if name in _LISTS:
        return tuple(text.split("+")) if text else ()
    if kind.startswith("bool") and text in ("true", "false"):
        return text == "true"
    if kind == "bool":
        raise ValueError(f"expected true or false, got {text!r}")
    return {"int": int, "float": float}.get(kind.split(" |")[0], str)(text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
