"""The log of a run: one JSON object per line, with a checksum, cut back to the checkpoint when the run resumes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from flexnsa.files import FileError, FileWarning, named, read_whole, write_whole
from flexnsa.lm.checkpoint.checksum import sealed, unsealed

LOG_NAME = "log.jsonl"
_START = b'{"step": '


class JSONLog:
    """Append-only records, each with a ``step``.

    Args:
        path: the file, created if missing.
        resume_step: records of this step and later are dropped, because the run will write them again.

    Raises:
        FileError: the file is not a log; it is unchanged.
        OSError: it cannot be read or written; names it.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        records = read_log(path) if path.exists() else []
        earlier = [record for record in records if record["step"] < resume_step]
        missing = earlier[-1]["step"] + 1 if earlier else 0
        if path.exists() and missing < resume_step:
            words = f"lacks the steps from {missing} to {resume_step - 1}, after which the run goes on"
            warnings.warn(f"{path}: {words}", FileWarning, stacklevel=2)
        write_whole(path, b"".join(sealed(record) + b"\n" for record in earlier))
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it is in the file when this returns.

        Raises:
            OSError: it could not be written; names the file.
        """
        line = memoryview(sealed(record) + b"\n")
        with named(self._path):
            while line:  # a disk that becomes full takes a part of it first
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_log(path: Path) -> bool:
    """Return whether a file starts as a log does."""
    with path.open("rb") as file:
        return file.read(len(_START)) == _START


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; a killed run may leave an unfinished one, which is dropped.

    Raises:
        FileError: a line is not the record of a step, differs from its checksum, or is of an earlier step than the one
            before it.
    """
    *lines, unfinished = read_whole(path).split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = unsealed(line)
            step, before = record.get("step"), records[-1]["step"] if records else -1
            if not isinstance(step, int) or step <= before:
                raise ValueError(f"expected a step after {before}, got {step!r}")
        except ValueError as error:
            raise _not_a_log(path, number, error) from error
        records.append(record)
    # It may be the first part of a line: after its closing brace only the newline can be damaged.
    if not (unfinished.startswith(_START) or _START.startswith(unfinished)) or b"}" in unfinished[:-1]:
        raise _not_a_log(path, len(lines) + 1, "it has no end")
    return records


def _not_a_log(path: Path, number: int, why: object) -> FileError:
    remedy = "restore the file from a copy, or move it away to begin a new log"
    return FileError(f"{path}: line {number} is no record of a training step; {why}; {remedy}")
