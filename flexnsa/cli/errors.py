"""One line for what the user got wrong: which option or file, and why. Any other error keeps its traceback."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from flexnsa.errors import FileError

_TOO_LARGE = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage, which ``--help`` gives."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.leave(2, f"{message} (see {self.prog} --help)")

    def leave(self, status: int, message: str) -> NoReturn:
        """Leave with a status and one line on stderr."""
        self.exit(status, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


@contextmanager
def one_line_errors(parser: Parser) -> Iterator[None]:
    """Answer for the errors that the library raises when an option or a file is wrong, or a run cannot go on.

    ``"seq_len: expected ..."`` is an error of the option that stores ``seq_len``; if there is none, it is no mistake
    of the user's. An :class:`OSError` is the user's if it names a file. Status 2; 1 where training diverged or the
    memory did not suffice, which no check could know before. Ctrl-C ends with status 130, as shells have it.
    """
    try:
        yield
    except KeyboardInterrupt:
        parser.exit(128 + signal.SIGINT, f"{parser.prog}: interrupted\n")
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError, FloatingPointError) as error:
        name, _, rest = str(error).partition(":")
        option = option_of(parser, name)
        if option is not None and isinstance(error, ValueError | TypeError | FileNotFoundError):
            parser.error(f"argument {option}:{rest}")
        if isinstance(error, FileError):
            parser.leave(2, str(error))
        if isinstance(error, OSError) and error.filename is not None:
            parser.leave(2, f"{error.filename}: {error.strerror}")
        if isinstance(error, FloatingPointError):
            parser.leave(1, str(error))
        if is_too_large(error):
            parser.leave(1, f"out of memory; `flexnsa estimate` says what sizes take ({str(error).strip()[:120]})")
        raise


def option_of(parser: argparse.ArgumentParser, name: str) -> str | None:
    """Give the option that stores ``name``, such as ``--seq`` for ``seq_len``."""
    options = {action.dest: "/".join(action.option_strings) for action in parser._actions}
    return options.get(name)


def is_too_large(error: Exception) -> bool:
    """Tell whether a tensor did not fit in memory, or not even in the numbers that count its bytes."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | TypeError | ValueError) and any(words in str(error) for words in _TOO_LARGE)
