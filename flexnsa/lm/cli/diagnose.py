"""``python -m flexnsa diagnose WHAT``: small commands that end by themselves and report what they found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexnsa.checks.primitives import check_int, check_positive_int, check_positive_number
from flexnsa.files import write_whole
from flexnsa.lm.cli import diagnose_selection
from flexnsa.lm.cli.options import output_file, output_folder
from flexnsa.lm.cli.recipe_options import add_recipe_options, axis_of_options, recipe_of_options
from flexnsa.lm.diagnosis import environment, gradients, soaking
from flexnsa.lm.diagnosis.allocator import compare_allocators
from flexnsa.lm.diagnosis.bisection import Trial, bisect
from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.diagnosis.matrix import Point, combine, run_matrix
from flexnsa.lm.diagnosis.recipe import Recipe, take_steps
from flexnsa.lm.parallel.joining import PARALLEL

_OF_RUNS = ("steps", "eval_every", "checkpoint_every")
"""Fields of training that have no meaning in a case."""
ON_CUDA = ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
ON_CPU = ("MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=262144")


@dataclass(frozen=True, slots=True)
class Report:
    """What a command reports: a sentence, a table, plain values, and whether all is well."""

    sentence: str
    table: str
    record: dict[str, Any]
    good: bool = True


class Look(NamedTuple):
    """A command: how it declares its options, and what it does with them."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    report: Callable[[argparse.Namespace], Report]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands, each with options of its own."""
    looks = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, (look, summary) in LOOKS.items():
        command = looks.add_parser(name, help=summary, description=summary.capitalize() + ".")
        look.add_arguments(command)
        command.set_defaults(report=look.report, command_parser=command)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print what the command reports, and write it to ``--json``; status 1 unless all is well."""
    report = arguments.report(arguments)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"sentence": report.sentence, "environment": environment.describe_environment()} | report.record
        write_whole(arguments.json, json.dumps(record, indent=2) + "\n")
    print("\n\n".join(part for part in (report.sentence, report.table) if part))
    if not report.good:
        raise SystemExit(1)


def _add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the report and the environment to a file"
    )


def _add_case_options(parser: argparse.ArgumentParser, name: str, *, seconds: float, parallel: bool = True) -> None:
    """Declare the options of every command that runs cases, and what is trained.

    Args:
        parser: of the command.
        name: of the command, and of its folder.
        seconds: default of the time limit.
        parallel: whether ranks can be parallel in more than one way.
    """
    parser.add_argument(
        "--out",
        type=output_folder,
        default=f"runs/diagnose/{name}",
        help="folder of logs and stacks; default: %(default)s",
    )
    parser.add_argument(
        "--limit", type=float, default=seconds, metavar="SECONDS", help="time limit of each case; default: %(default)g"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this machine; default: %(default)s")
    if parallel:
        parser.add_argument(
            "--parallel", choices=PARALLEL, help="what each process holds; default: ddp for more than one"
        )
    _add_json_option(parser)
    add_recipe_options(parser, skip=_OF_RUNS)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return what the options of a case name.

    Raises:
        ValueError: an option is out of range, or does not fit another.
    """
    check_positive_number("limit", arguments.limit)
    parallel = getattr(arguments, "parallel", "ddp") or ("ddp" if arguments.ranks > 1 else None)
    recipe = recipe_of_options(arguments, parallel=parallel, ranks=arguments.ranks)
    recipe.check()
    return recipe


def _environment(_arguments: argparse.Namespace) -> Report:
    record = environment.describe_environment()
    return Report(environment.sentence(record), environment.table(record), {"environment": record})


def _add_gradients(parser: argparse.ArgumentParser) -> None:
    _add_case_options(parser, "gradients", seconds=600, parallel=False)


def _gradients(arguments: argparse.Namespace) -> Report:
    outcome = recipe_of(arguments).run(arguments.out, gradients.trace_variants, seconds=arguments.limit)
    if not outcome.passed:
        return _failure(outcome, arguments.out)
    record = outcome.values
    return Report(gradients.sentence(record), gradients.table(record), record, not gradients.has_missing(record))


def _add_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100, help="number of steps; default: %(default)s")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.25,
        metavar="MIB",
        help="growth of memory per step above which the command fails; default: %(default)s",
    )
    _add_case_options(parser, "soak", seconds=3600)


def _soak(arguments: argparse.Namespace) -> Report:
    check_int("steps", arguments.steps, 2)
    check_positive_number("threshold", arguments.threshold)
    steps = arguments.steps, arguments.threshold
    outcome = recipe_of(arguments).run(arguments.out, soaking.soak_recipe, *steps, seconds=arguments.limit)
    if not outcome.passed:
        return _failure(outcome, arguments.out)
    record = outcome.values
    return Report(soaking.sentence(record), soaking.table(record), record, not soaking.has_grown(record))


def _failure(outcome: Outcome, folder: Path) -> Report:
    """Report a single case that returned nothing."""
    return Report(f"{outcome.status}: {outcome.reason} (see {folder}).", "", asdict(outcome), good=False)


def _add_bisect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2, help="steps of each trial; default: %(default)s")
    _add_case_options(parser, "bisect", seconds=120)


def _bisect(arguments: argparse.Namespace) -> Report:
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
    return Report(found.sentence(), found.table(), found.record(), not found.found)


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="an option and the values to try, such as branches=cmp+slc,win or seq_len=512,1024; replaces the axis of "
        "that name among branches, impl, checkpointing, precision and ranks, or adds one",
    )
    parser.add_argument("--steps", type=int, default=2, help="steps of each case; default: %(default)s")
    parser.add_argument("--retry", action="store_true", help="run cases again that did not pass in an earlier start")
    _add_case_options(parser, "matrix", seconds=300)


def _matrix(arguments: argparse.Namespace) -> Report:
    check_positive_int("steps", arguments.steps)
    recipe = recipe_of(arguments)
    axes = _default_axes(recipe) | dict(map(axis_of_options, arguments.axis))
    for point in combine(axes):
        recipe.at(**point).check()

    def run(point: Point, folder: Path) -> Outcome:
        return recipe.at(**point).run(folder, take_steps, arguments.steps, seconds=arguments.limit)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    about = recipe.record() | {"steps": arguments.steps}
    matrix = run_matrix(arguments.out, axes, run, about=about, retry=arguments.retry, report=report)
    return Report(matrix.sentence(), matrix.table(), matrix.record(), matrix.passed)


def _default_axes(recipe: Recipe) -> dict[str, Sequence[Any]]:
    """Return the axes along which runs fail most: branches, implementations, checkpointing, precision and ranks."""
    cuda = torch.device(recipe.device).type == "cuda"
    ranks = [1, 2] if not cuda or torch.cuda.device_count() > 1 else [1]
    model = recipe.model
    alone = [(tag,) for tag in model.branches] if model.attention == "nsa" else []
    return {
        "branches": list(dict.fromkeys([model.branches, *alone])),
        "impl": ["flex", "triton"] if cuda else ["sdpa", "reference"],
        "checkpointing": ["none", "all"],
        "precision": ["fp32", "bf16"],
        "ranks": list(dict.fromkeys([*ranks, recipe.ranks])),
    }


def _add_allocator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE[ NAME=VALUE]",
        help="variables of the environment to compare; repeat for each setting; default: expandable segments of "
        "PyTorch's allocator off and on, or on a CPU two settings of the C library's",
    )
    parser.add_argument("--steps", type=int, default=5, help="steps under each setting; default: %(default)s")
    _add_case_options(parser, "allocator", seconds=600)


def _allocator(arguments: argparse.Namespace) -> Report:
    check_positive_int("steps", arguments.steps)
    recipe = recipe_of(arguments)
    given = arguments.setting or (ON_CUDA if arguments.device.type == "cuda" else ON_CPU)
    settings = {text: _variables(text) for text in given}
    found = compare_allocators(recipe, arguments.out, settings, steps=arguments.steps, seconds=arguments.limit)
    return Report(found.sentence(), found.table(), found.record(), found.passed)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    diagnose_selection.add_arguments(parser)
    _add_json_option(parser)


def _variables(text: str) -> Mapping[str, str]:
    pairs = [word.partition("=") for word in text.split()]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"setting: expected NAME=VALUE, or several between spaces, got {text!r}")
    return {name: value for name, _, value in pairs}


LOOKS = {
    "environment": (Look(_add_json_option, _environment), "software, machine, threads and variables of a run"),
    "gradients": (
        Look(_add_gradients, _gradients),
        "one backward pass in DDP: which gradients are missing, and in which order they arrive",
    ),
    "soak": (Look(_add_soak, _soak), "many steps: tokens a second, and whether memory grows from one to the next"),
    "bisect": (
        Look(_add_bisect, _bisect),
        "a step that fails or hangs: the layer, the checkpointing and the branch that it needs for that",
    ),
    "matrix": (
        Look(_add_matrix, _matrix),
        "steps in every combination of branches, implementations, checkpointing, precision and ranks",
    ),
    "selection": (
        Look(_add_selection, lambda arguments: Report(*diagnose_selection.report(arguments))),
        "a trained model: how much of what the best blocks hold each layer selects",
    ),
    "allocator": (Look(_add_allocator, _allocator), "the peak of the same steps under settings of the allocator"),
}
