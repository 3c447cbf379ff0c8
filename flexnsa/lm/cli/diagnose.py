"""``python -m flexnsa diagnose WHAT``: small commands that end by themselves and report what they found."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexnsa.files import write_whole
from flexnsa.lm.cli.generate import load_model
from flexnsa.lm.cli.options import add_device_option, output_file, output_folder, require
from flexnsa.lm.cli.train import add_recipe_options, recipe_of_options
from flexnsa.lm.data.corpus import read_corpus
from flexnsa.lm.diagnosis.bisection import Trial, bisect
from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.diagnosis.environment import describe_environment, report_environment
from flexnsa.lm.diagnosis.gradients import report_gradients, trace_variants
from flexnsa.lm.diagnosis.matrix import Point, combine, run_matrix
from flexnsa.lm.diagnosis.memory import report_growth, report_peaks, soak_recipe
from flexnsa.lm.diagnosis.recipe import Recipe, axis_of, default_axes, take_steps
from flexnsa.lm.diagnosis.selection import report_selection
from flexnsa.lm.measure.table import Report
from flexnsa.lm.parallel.joining import PARALLEL
from flexnsa.primitives import check_int, check_positive_int, check_positive_number

_OF_RUNS = ("steps", "eval_every", "checkpoint_every")
"""Fields of training that have no meaning in a case."""
ON_CUDA = ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
ON_CPU = ("MALLOC_ARENA_MAX=1", "MALLOC_MMAP_THRESHOLD_=262144")


class Look(NamedTuple):
    """A command: what it does in words, how it declares its options, and what it does with them."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    report: Callable[[argparse.Namespace], Report]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the commands, each with options of its own."""
    looks = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, look in LOOKS.items():
        command = looks.add_parser(name, help=look.summary, description=look.summary.capitalize() + ".")
        look.add_arguments(command)
        command.add_argument(
            "--json", type=output_file, metavar="FILE", help="also write the report and the environment to a file"
        )
        command.set_defaults(report=look.report, command_parser=command)


def execute(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    """Print what the command reports, and write it to ``--json``; status 1 unless all is well."""
    report = arguments.report(arguments)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"sentence": report.sentence, "environment": describe_environment()} | report.record
        write_whole(arguments.json, json.dumps(record, indent=2) + "\n")
    print("\n\n".join(part for part in (report.sentence, report.table) if part))
    if not report.passed:
        raise SystemExit(1)


def _add_case_options(
    parser: argparse.ArgumentParser, name: str, *, seconds: float, steps: tuple[int, str] | None, parallel: bool = True
) -> None:
    """Declare the options of every command that runs cases, and what is trained.

    ``steps`` has the default of that option and what it means, or is None without it; ``parallel`` says whether ranks
    can be parallel in more than one way.
    """
    if steps is not None:
        parser.add_argument("--steps", type=int, default=steps[0], help=f"{steps[1]}; default: %(default)s")
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
    add_recipe_options(parser, skip=_OF_RUNS)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return what the options of a case name.

    Raises:
        ValueError: an option is out of range, or does not fit another.
    """
    check_positive_int("steps", getattr(arguments, "steps", 1))
    check_positive_number("limit", arguments.limit)
    parallel = getattr(arguments, "parallel", "ddp") or ("ddp" if arguments.ranks > 1 else None)
    recipe = recipe_of_options(arguments, parallel=parallel, ranks=arguments.ranks)
    recipe.check()
    return recipe


def _report_case(
    arguments: argparse.Namespace, report: Callable[[dict[str, Any]], Report], function: Callable[..., Any], *rest: Any
) -> Report:
    """Run ``function(recipe, *rest)`` as a single case, and report what it returned, or why it did not."""
    outcome = recipe_of(arguments).run(arguments.out, function, *rest, seconds=arguments.limit)
    if outcome.passed:
        return report(outcome.values)
    sentence = f"{outcome.status}: {outcome.reason} (see {arguments.out})."
    return Report(sentence=sentence, table="", record=asdict(outcome), passed=False)


def _add_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.25,
        metavar="MIB",
        help="growth of memory per step above which the command fails; default: %(default)s",
    )
    _add_case_options(parser, "soak", seconds=3600, steps=(100, "number of steps"))


def _soak(arguments: argparse.Namespace) -> Report:
    check_int("steps", arguments.steps, 2)
    check_positive_number("threshold", arguments.threshold)
    return _report_case(arguments, report_growth, soak_recipe, arguments.steps, arguments.threshold)


def _bisect(arguments: argparse.Namespace) -> Report:
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

    return bisect(run, whole)


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="an option and the values to try, such as branches=cmp+slc,win or seq_len=512,1024; replaces the axis of "
        "that name among branches, impl, checkpointing, precision and ranks, or adds one",
    )
    parser.add_argument("--retry", action="store_true", help="run cases again that did not pass in an earlier start")
    _add_case_options(parser, "matrix", seconds=300, steps=(2, "steps of each case"))


def _matrix(arguments: argparse.Namespace) -> Report:
    recipe = recipe_of(arguments)
    axes = default_axes(recipe) | dict(map(axis_of, arguments.axis))
    for point in combine(axes):
        recipe.at(**point).check()

    def run(point: Point, folder: Path) -> Outcome:
        return recipe.at(**point).run(folder, take_steps, arguments.steps, seconds=arguments.limit)

    report = partial(print, file=sys.stderr, flush=True)
    about = recipe.record() | {"steps": arguments.steps}
    return run_matrix(arguments.out, axes, run, about=about, retry=arguments.retry, report=report)


def _add_allocator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE[ NAME=VALUE]",
        help="variables of the environment to compare; repeat for each setting; default: expandable segments of "
        "PyTorch's allocator off and on, or on a CPU two settings of the C library's",
    )
    _add_case_options(parser, "allocator", seconds=600, steps=(5, "steps under each setting"))


def _allocator(arguments: argparse.Namespace) -> Report:
    """Take the same steps in new processes, with variables set that libraries read when they are loaded."""
    recipe = recipe_of(arguments)
    texts = arguments.setting or (ON_CUDA if arguments.device.type == "cuda" else ON_CPU)
    settings = {text: _variables(text) for text in texts}
    outcomes: dict[str, Outcome] = {}
    for number, (text, variables) in enumerate(settings.items()):
        case: dict[str, Any] = {"seconds": arguments.limit, "variables": variables}
        outcomes[text] = recipe.run(arguments.out / str(number), take_steps, arguments.steps, **case)
    return report_peaks(outcomes)


def _variables(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split()]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"setting: expected NAME=VALUE, or several between spaces, got {text!r}")
    return {name: value for name, _, value in pairs}


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="checkpoint of `flexnsa train`, or the folder of its run"
    )
    parser.add_argument(
        "--text", type=Path, help="text file or folder; default: the source of Python's standard library"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence; default: %(default)s")
    parser.add_argument(
        "--sequences", type=int, default=4, help="sequences, spread over the validation text; default: %(default)s"
    )
    add_device_option(parser)


def _selection(arguments: argparse.Namespace) -> Report:
    require("safetensors", "numpy", extra="train")
    check_positive_int("seq_len", arguments.seq_len)
    check_positive_int("sequences", arguments.sequences)
    model, tokenizer = load_model(arguments.checkpoint, arguments.device)
    corpus = read_corpus(arguments.text, tokenizer)
    corpus.require_rows(arguments.seq_len)
    ids = corpus.tokens("validation").ids
    starts = torch.linspace(0, len(ids) - arguments.seq_len, arguments.sequences).long()
    tokens = torch.stack([ids[start : start + arguments.seq_len] for start in starts.tolist()]).long()
    return report_selection(model, tokens.to(arguments.device))


LOOKS = {
    "environment": Look(
        "software, machine, threads and variables of a run",
        lambda _: None,
        lambda _: report_environment(describe_environment()),
    ),
    "gradients": Look(
        "one backward pass in DDP: which gradients are missing, and in which order they arrive",
        partial(_add_case_options, name="gradients", seconds=600, steps=None, parallel=False),
        lambda arguments: _report_case(arguments, report_gradients, trace_variants),
    ),
    "soak": Look("many steps: tokens a second, and whether memory grows from one to the next", _add_soak, _soak),
    "bisect": Look(
        "a step that fails or hangs: the layer, the checkpointing and the branch that it needs for that",
        partial(_add_case_options, name="bisect", seconds=120, steps=(2, "steps of each trial")),
        _bisect,
    ),
    "matrix": Look(
        "steps in every combination of branches, implementations, checkpointing, precision and ranks",
        _add_matrix,
        _matrix,
    ),
    "selection": Look(
        "a trained model: how much of what the best blocks hold each layer selects", _add_selection, _selection
    ),
    "allocator": Look("the peak of the same steps under settings of the allocator", _add_allocator, _allocator),
}
