"""How every command of ``diagnose`` ends: a sentence, a table, a file if one is asked for, and an honest status."""

from __future__ import annotations

import argparse
import json
from typing import Any

from flexnsa.cli.options import output_file
from flexnsa.diagnostics.environment import describe_environment
from flexnsa.files import write_whole


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    text = "write what was seen to a file, too, and the environment"
    parser.add_argument("--json", type=output_file, metavar="FILE", help=text)


def show(
    arguments: argparse.Namespace, sentence: str, table: str, record: dict[str, Any], *, good: bool = True
) -> None:
    """Print a sentence and a table, and leave with status 1 if what was seen is not good."""
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        seen = {"sentence": sentence, "environment": describe_environment()} | record
        write_whole(arguments.json, json.dumps(seen, indent=2) + "\n")
    print("\n\n".join(part for part in (sentence, table) if part))
    if not good:
        raise SystemExit(1)
