"""``python -m flexnsa diagnose soak``."""

from __future__ import annotations

import argparse

from flexnsa.cli.diagnose.cases import add_case_options, recipe_of, show_outcome
from flexnsa.diagnostics import soaking
from flexnsa.validation import check_int, check_positive_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.25,
        metavar="MIB",
        help="growth a step that is too much; default: %(default)s",
    )
    add_case_options(parser, "soak", seconds=3600)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Take steps and look at time and memory; status 1 where memory grows."""
    check_int("steps", arguments.steps, 2)
    check_positive_number("threshold", arguments.threshold)
    recipe = recipe_of(arguments)
    outcome = recipe.run(
        arguments.out, soaking.soak_recipe, arguments.steps, arguments.threshold, seconds=arguments.limit
    )
    show_outcome(arguments, outcome, soaking.sentence, soaking.table, lambda record: not soaking.has_grown(record))
