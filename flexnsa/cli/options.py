"""Command-line options made of the fields of config dataclasses, so that neither can drift from the other."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch


def add_config_options(
    parser: argparse.ArgumentParser, title: str, config_class: type, skip: tuple[str, ...] = ()
) -> None:
    """Add ``--seq-len`` for a field ``seq_len``, and so on; an option left out leaves no trace in the namespace."""
    group = parser.add_argument_group(title)
    for name, hint in get_type_hints(config_class).items():
        if name in skip:
            continue
        choices = get_args(hint) if get_origin(hint) is Literal else None
        kind = str if choices else next(iter(get_args(hint)), hint)  # int | None is an option of type int
        metavar = None if choices else kind.__name__.upper()
        group.add_argument(option_name(name), type=kind, choices=choices, default=argparse.SUPPRESS, metavar=metavar)


def config_options(arguments: argparse.Namespace, config_class: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Give the fields that the command line set."""
    names = {field.name for field in fields(config_class)} - set(skip)
    return {name: value for name, value in vars(arguments).items() if name in names}


def option_name(field_name: str) -> str:
    """Give ``--seq-len`` for ``seq_len``."""
    return "--" + field_name.replace("_", "-")


def device(name: str) -> torch.device:
    """Read a ``--device``; without CUDA, no device of it."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a device such as cpu or cuda:0, got {name!r}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"expected a device of this machine, got {name!r}, but there is no CUDA here")
    return found


@contextmanager
def reported_by(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Turn what the user got wrong, ``"seq_len: expected ..."``, into an error of the option ``--seq-len``."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError) as error:
        name, colon, rest = str(error).partition(":")
        if not colon or f"{option_name(name)} " not in parser.format_help():
            raise
        parser.error(f"argument {option_name(name)}:{rest}")


def require(*packages: str, extra: str) -> None:
    """Leave with one line if a package that the command needs is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f'flexnsa: {", ".join(missing)} not installed; try: pip install "flexnsa[{extra}]"')
