"""Command-line options made from the fields of config dataclasses, and types of options."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from flexnsa.lm.training.config import TrainConfig


def add_config_options(
    parser: argparse.ArgumentParser, title: str, config_class: type, skip: tuple[str, ...] = ()
) -> None:
    """Add the option of each field, in a group of its own; see :func:`add_config_option`."""
    group = parser.add_argument_group(title)
    for name in _hints(config_class):
        if name not in skip:
            add_config_option(group, config_class, name)


def add_config_option(parser: argparse._ActionsContainer, config_class: type, name: str) -> None:
    """Add ``--seq-len`` for a field ``seq_len``, and so on; an option left out leaves no trace in the namespace."""
    hint, explanation = _hints(config_class)[name], described_fields(config_class).get(name, "")
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": explanation.replace("%", "%%")}
    if hint is bool:
        parser.add_argument(option_name(name), action=argparse.BooleanOptionalAction, **options)
        return
    choices = get_args(hint) if get_origin(hint) is Literal else None
    kind = str if choices else next(iter(get_args(hint)), hint)  # int | None is an option of type int
    metavar = None if choices else kind.__name__.upper()
    if hint == int | tuple[int, ...]:
        kind, metavar = _numbers, "INT,..."
    if get_origin(hint) is tuple:
        options, metavar = options | {"nargs": "+"}, "TAG"
    parser.add_argument(option_name(name), type=kind, choices=choices, metavar=metavar, **options)


def add_stages_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--stages``, sequences that grow, and their kinds; one left out leaves no trace in the namespace."""
    parser.add_argument(
        "--stages",
        type=_stages,
        default=argparse.SUPPRESS,
        metavar="TOKENS:SHARE,...",
        help="sequences that grow: tokens of a sequence and share of the steps of each stage, such as "
        "2048:0.15,8192:0.35,32768:0.5; a pass has as many tokens in all of them",
    )
    for name in ("dense_stages", "indexer_stages"):
        add_config_option(parser, TrainConfig, name)


def _stages(text: str) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(length), float(share)) for length, share in (part.split(":") for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected such as 2048:0.25,8192:0.75, got {text!r}") from error


def _numbers(text: str) -> int | tuple[int, ...]:
    try:
        first, *others = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected such as 3 or 0,0,2, got {text!r}") from error
    return (first, *others) if others else first


_hints = functools.cache(get_type_hints)


@functools.cache
def described_fields(config_class: type) -> dict[str, str]:
    """Return what the docstrings of a config and of the classes below it say of each field, as plain text."""
    plain, described = re.compile(r":\w+:`~?([^`]*)`|``([^`]*)``"), dict[str, str]()
    for cls in reversed(config_class.__mro__):
        arguments = re.search(r"^Args:\n((?:[ ]+.*\n|\n)+)", f"{inspect.getdoc(cls)}\n", re.MULTILINE)
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments[1] if arguments else "", re.MULTILINE)
        for name, text in entries:
            described[name] = plain.sub(r"\1\2", " ".join(text.split())).removesuffix(".")
    return described


def config_options(arguments: argparse.Namespace, config_class: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields that the command line set."""
    names = {field.name for field in fields(config_class)} - set(skip)
    return {name: value for name, value in vars(arguments).items() if name in names}


def option_name(field_name: str) -> str:
    """Return ``--seq-len`` for ``seq_len``."""
    return "--" + field_name.replace("_", "-")


def check_integers(arguments: argparse.Namespace) -> None:
    """Check that integers fit into 64 bits.

    Raises:
        ValueError: one does not.
    """
    for name, value in vars(arguments).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected a number of at most 64 bits, got {value}")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, by default CUDA if available."""
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="such as cpu, cuda or cuda:1; auto is cuda if available and else cpu; default: %(default)s",
    )


def add_checkpointing_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--checkpointing`` and ``--no-checkpointing``; without them, the namespace has no such name."""
    parser.add_argument(
        "--checkpointing",
        nargs="?",
        const=True,
        default=argparse.SUPPRESS,
        metavar="LAYERS",
        help="layers to recompute in backward instead of keeping their activations: none, all (as without a value), "
        "0:6 for the first six, every:2 for every other one; default: of the preset",
    )
    parser.add_argument(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        default=argparse.SUPPRESS,
        help="recompute no layers",
    )


def device(name: str) -> torch.device:
    """Read a ``--device``, which this machine has to have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a device such as cpu or cuda:0, got {name!r}") from error
    module: Any = getattr(torch, named.type, None)  # such as torch.cuda; a meta device has none, and cannot compute
    here = module.device_count() if hasattr(module, "is_available") and module.is_available() else 0
    if (named.index or 0) >= here:
        raise argparse.ArgumentTypeError(f"expected a device of this machine, got {name!r}, which is not here")
    return named


def utf8(text: str) -> bytes:
    """Return text as bytes; bytes of the command line that are not UTF-8 are unchanged."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"expected text that UTF-8 can hold, got {text!r}") from error


def output_folder(name: str) -> Path:
    """Read the name of a folder to write to, which exists or can be made."""
    path = _nameable(name, "a folder")
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {name!r}, but {str(existing)!r} is a file")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a folder to write to, got {name!r}, but {str(existing)!r} is not")
    return path


def output_file(name: str) -> Path:
    """Read the name of a file to write, in a folder that exists or can be made."""
    path = _nameable(name, "a file")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got {name!r}, which is a folder")
    output_folder(str(path.parent))
    return path


def _nameable(name: str, kind: str) -> Path:
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise argparse.ArgumentTypeError(f"expected {kind}, got {name!r}, which no file system can name")
    return Path(name)


def require(*packages: str, extra: str) -> None:
    """Exit with one line if a package that the command needs is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f"flexnsa: {', '.join(missing)} not installed: install flexnsa with its extra {extra!r}")
