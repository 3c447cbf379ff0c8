"""``python -m flexnsa diagnose gradients``."""

from __future__ import annotations

import argparse

from flexnsa.cli.diagnose.cases import add_case_options, recipe_of, show_outcome
from flexnsa.diagnostics import gradient_variants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_case_options(parser, "gradients", seconds=600, parallel=False)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Trace the gradients of one step in each variant; status 1 where one is missing."""
    recipe = recipe_of(arguments)
    outcome = recipe.run(arguments.out, gradient_variants.trace_variants, seconds=arguments.limit)
    show_outcome(
        arguments,
        outcome,
        gradient_variants.sentence,
        gradient_variants.table,
        lambda record: not gradient_variants.has_missing(record),
    )
