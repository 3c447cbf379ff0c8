"""``python -m flexnsa diagnose allocator``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from flexnsa.cli.diagnose.cases import add_case_options, recipe_of
from flexnsa.cli.diagnose.showing import show
from flexnsa.diagnostics.allocator import compare_allocators
from flexnsa.validation import check_positive_int

ON_CUDA = ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
ON_CPU = ("MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=262144")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE[ NAME=VALUE]",
        help="variables of the environment to compare, said once for each setting; default: expandable segments of "
        "PyTorch's allocator off and on, or on a CPU two of the C library's",
    )
    parser.add_argument("--steps", type=int, default=5, help="under each setting; default: %(default)s")
    add_case_options(parser, "allocator", seconds=600)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Compare the peak of a few steps; status 1 where they do not come to their end under a setting."""
    check_positive_int("steps", arguments.steps)
    recipe = recipe_of(arguments)
    given = arguments.setting or (ON_CUDA if arguments.device.type == "cuda" else ON_CPU)
    settings = {text: _variables(text) for text in given}
    found = compare_allocators(recipe, arguments.out, settings, steps=arguments.steps, seconds=arguments.limit)
    show(arguments, found.sentence(), found.table(), found.record(), good=found.passed)


def _variables(text: str) -> Mapping[str, str]:
    pairs = [word.partition("=") for word in text.split()]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"setting: expected NAME=VALUE, or several between spaces, got {text!r}")
    return {name: value for name, _, value in pairs}
