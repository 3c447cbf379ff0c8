"""The command line: ``python -m flexnsa COMMAND``; each command lives in a module of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flexnsa.cli.errors import Parser, one_line_errors
from flexnsa.cli.options import check_integers

COMMANDS = {
    "train": "train a byte-level language model on text",
    "generate": "continue a prompt with a trained model, as it is written",
    "demo": "train NSA beside its dense twin, check exactness, measure memory and time",
    "estimate": "say what a model will take in memory and in decoding, from its configuration alone",
    "diagnose": "say what a run depends on, and look for what makes it fail, hang or grow",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` names; what the user got wrong ends with a status and a line that names it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="flexnsa", description="Native Sparse Attention.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        if name in argv[:1]:  # only the command that runs is imported
            module = importlib.import_module("flexnsa.cli." + name)
            module.add_arguments(command)
            command.set_defaults(execute=module.execute, command_parser=command)
    arguments = parser.parse_args(argv)
    with one_line_errors(arguments.command_parser):
        check_integers(arguments)
        arguments.execute(arguments, arguments.command_parser)
