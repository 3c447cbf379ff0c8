"""The command line: ``python -m flexnsa COMMAND``; each command is a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flexnsa.lm.cli.errors import Parser, one_line_errors, one_line_warnings
from flexnsa.lm.cli.options import check_integers

COMMANDS = {
    "train": "train a byte-level language model on text",
    "generate": "continue a prompt with a trained model",
    "estimate": "estimate the memory of training and the cost of decoding, from the configuration alone",
    "diagnose": "report the environment of a run, and find what makes it fail, hang or grow",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` names; a mistake of the user ends it with a status and a line that names it."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = parser_for(argv).parse_args(argv)
    with one_line_errors(arguments.command_parser), one_line_warnings(arguments.command_parser):
        check_integers(arguments)
        arguments.execute(arguments, arguments.command_parser)


def parser_for(argv: Sequence[str]) -> Parser:
    """Return the parser of ``argv``, which knows the options of the command that ``argv`` names."""
    parser = Parser(prog="flexnsa", description="Native Sparse Attention.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        if name in argv[:1]:  # import only the command that runs
            module = importlib.import_module("flexnsa.lm.cli." + name)
            module.add_arguments(command)
            command.set_defaults(execute=module.execute, command_parser=command)
    return parser
