"""``python -m flexnsa diagnose bisect``."""

from __future__ import annotations

import argparse

from flexnsa.cli.diagnose.cases import add_case_options, recipe_of
from flexnsa.cli.diagnose.showing import show
from flexnsa.diagnostics.bisection import Trial, bisect
from flexnsa.diagnostics.cases import Outcome
from flexnsa.diagnostics.recipe_steps import take_steps
from flexnsa.validation import check_positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--steps", type=int, default=2, help="of each trial; default: %(default)s")
    add_case_options(parser, "bisect", seconds=120)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Find what a step needs to fail or hang; status 1 where it does."""
    check_positive_int("steps", arguments.steps)
    recipe = recipe_of(arguments)
    model = recipe.model
    checkpointed = [layer for layer in range(model.num_layers) if model.is_checkpointed(layer)]
    whole = Trial(
        num_layers=model.num_layers,
        checkpointed=(checkpointed[0], checkpointed[-1] + 1) if checkpointed else (0, 0),
        branches=model.branches if model.attention == "nsa" else (),
    )

    def run(trial: Trial) -> Outcome:
        branches = {"branches": trial.branches} if trial.branches else {}
        tried = recipe.at(num_layers=trial.num_layers, checkpointing=trial.checkpointed, **branches)
        return tried.run(arguments.out / trial.name(), take_steps, arguments.steps, seconds=arguments.limit)

    found = bisect(run, whole)
    show(arguments, found.sentence(), found.table(), found.record(), good=not found.found)
