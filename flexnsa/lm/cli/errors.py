"""Errors of the user as one line that names the option or the file. Any other error keeps its traceback."""

from __future__ import annotations

import argparse
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from flexnsa.files import FileError, FileWarning
from flexnsa.lm.parallel.agreement import RanksDifferError

_TOO_LARGE = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage that ``--help`` prints."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.leave(2, f"{message} (see {self.prog} --help)")

    def leave(self, status: int, message: str) -> NoReturn:
        """Exit with a status and one line on stderr."""
        self.exit(status, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


@contextmanager
def one_line_errors(parser: Parser) -> Iterator[None]:
    """Turn errors of the library about an option, a file or a run into one line and a status.

    ``"seq_len: expected ..."`` is an error of the option that stores ``seq_len``; without such an option it is not a
    mistake of the user. An :class:`OSError` is one if it names a file. The status is 2, or 1 where training diverged or
    memory ran out, which no check can know before. Ctrl-C ends with status 130, as in shells.
    """
    try:
        yield
    except KeyboardInterrupt:
        parser.exit(128 + signal.SIGINT, f"{parser.prog}: interrupted\n")
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError, FloatingPointError) as error:
        name, _, rest = str(error).partition(":")
        option = next(("/".join(action.option_strings) for action in parser._actions if action.dest == name), None)
        if option is not None and isinstance(error, ValueError | TypeError | FileNotFoundError):
            parser.error(f"argument {option}:{rest}")
        if isinstance(error, FileError | RanksDifferError):
            parser.leave(2, str(error))
        if isinstance(error, OSError) and error.filename is not None:
            parser.leave(2, f"{error.filename}: {error.strerror}")
        if isinstance(error, FloatingPointError):
            parser.leave(1, str(error))
        if is_too_large(error):
            parser.leave(1, f"out of memory; `flexnsa estimate` says what sizes take ({str(error).strip()[:120]})")
        raise


@contextmanager
def one_line_warnings(parser: Parser) -> Iterator[None]:
    """Show warnings about files as one line on stderr; other warnings are unchanged."""
    format_place = warnings.formatwarning

    def format_in_one_line(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> str:
        if issubclass(category, FileWarning):
            return f"{parser.prog}: warning: {message}\n"
        return format_place(message, category, *place, **options)

    warnings.formatwarning = format_in_one_line
    try:
        yield
    finally:
        warnings.formatwarning = format_place


def is_too_large(error: Exception) -> bool:
    """Return whether a tensor does not fit in memory, or its size in an integer."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | TypeError | ValueError) and any(words in str(error) for words in _TOO_LARGE)
