"""``python -m flexnsa diagnose environment``."""

from __future__ import annotations

import argparse

from flexnsa.cli.diagnose.showing import add_json_option, show
from flexnsa.diagnostics import environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json_option(parser)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Say what a run here depends on."""
    record = environment.describe_environment()
    show(arguments, environment.sentence(record), environment.table(record), {"environment": record})
