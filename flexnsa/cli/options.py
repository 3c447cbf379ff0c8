"""Command-line options made of the fields of config dataclasses, so that neither can drift from the other."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
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
        if hint is bool:
            group.add_argument(option_name(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
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


def check_integers(arguments: argparse.Namespace) -> None:
    """Demand numbers that tensors can count with.

    Raises:
        ValueError: one needs more than 64 bits.
    """
    for name, value in vars(arguments).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{name}: expected a number of at most 64 bits, got {value}")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, by default CUDA where there is one."""
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="such as cpu, cuda or cuda:1; auto is cuda where there is one and else cpu; default: %(default)s",
    )


def add_checkpointing_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--checkpointing`` and ``--no-checkpointing``; left out, they leave no trace in the namespace."""
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
        "--no-checkpointing", dest="checkpointing", action="store_false", default=argparse.SUPPRESS, help="none"
    )


def add_recompute_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--recompute``; left out, it leaves no trace in the namespace."""
    explanation = "branches to run again in backward instead of keeping what they give: of cmp, slc and win"
    parser.add_argument("--recompute", nargs="+", default=argparse.SUPPRESS, metavar="TAG", help=explanation)


def device(name: str) -> torch.device:
    """Read a ``--device``, one that this machine has."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a device such as cpu or cuda:0, got {name!r}") from error
    module: Any = getattr(
        torch, found.type, None
    )  # such as torch.cuda; a meta device has none, and can compute nothing
    here = module.device_count() if hasattr(module, "is_available") and module.is_available() else 0
    if (found.index or 0) >= here:
        raise argparse.ArgumentTypeError(f"expected a device of this machine, got {name!r}, which is not here")
    return found


def utf8(text: str) -> bytes:
    """Read text as its bytes; those that were no UTF-8 on the command line stay what they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"expected text that UTF-8 can hold, got {text!r}") from error


def output_folder(name: str) -> Path:
    """Read the name of a folder to write to, which is there or can be made."""
    path = _nameable(name, "a folder")
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {name!r}, but {str(existing)!r} is a file")
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a folder to write to, got {name!r}, but {str(existing)!r} is not")
    return path


def output_file(name: str) -> Path:
    """Read the name of a file to write, in a folder that is there or can be made."""
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
    """Leave with one line if a package that the command needs is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SystemExit(f"flexnsa: {', '.join(missing)} not installed: install flexnsa with its extra {extra!r}")
