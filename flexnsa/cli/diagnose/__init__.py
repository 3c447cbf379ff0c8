"""``python -m flexnsa diagnose WHAT``: small commands that end by themselves and say what they saw."""

from __future__ import annotations

import argparse

from flexnsa.cli.diagnose import allocator, bisect, environment, gradients, matrix, soak

LOOKS = {
    "environment": (environment, "software, machine, threads and variables that a run depends on"),
    "gradients": (gradients, "one backward pass in DDP: whose gradient is missing, in which order they arrive"),
    "soak": (soak, "many steps: tokens a second, and whether memory grows from one to the next"),
    "bisect": (
        bisect,
        "a step that fails or hangs: which layer, whose checkpointing and which branch it needs for that",
    ),
    "matrix": (matrix, "steps in every combination of branches, implementations, checkpointing, precision and ranks"),
    "allocator": (allocator, "the peak of the same steps under settings of the memory allocator"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be looked at, each with options of its own."""
    looks = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (module, summary) in LOOKS.items():
        look = looks.add_parser(name, help=summary, description=summary.capitalize() + ".")
        module.add_arguments(look)
        look.set_defaults(look=module.execute, command_parser=look)


def execute(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Look at what was named."""
    arguments.look(arguments, parser)
