"""``python -m flexnsa diagnose WHAT``: small commands that end by themselves and say what they saw."""

from __future__ import annotations

import argparse
import json

from flexnsa.cli.options import output_file
from flexnsa.diagnostics import environment
from flexnsa.files import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be looked at."""
    parser.add_argument("what", choices=("environment",), help="environment: software, machine, threads, variables")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write what was seen to a file, too")


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print a sentence and a table."""
    record = environment.describe_environment()
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.json, json.dumps(record, indent=2) + "\n")
    print(environment.sentence(record) + "\n\n" + environment.table(record))
