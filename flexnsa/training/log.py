"""The log of a run: one JSON object a line, cut back to the checkpoint when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexnsa.errors import FileError
from flexnsa.files import write_whole

_START = b'{"step": '


class JSONLog:
    """Append-only records, each with a ``step``.

    Args:
        path: the file; made if it is not there.
        resume_step: records of this step and later are dropped, for the run will write them again.

    Raises:
        FileError: the file is something else; it stays as it is.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [record for record in read_log(path) if record["step"] < resume_step] if path.exists() else []
        write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it is in the file when this returns."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; one that a killed run left unfinished is no record.

    Raises:
        FileError: a line is no record of a step.
    """
    *lines, unfinished = path.read_bytes().split(b"\n")
    records = [_record(line) for line in lines]
    if None in records or not (unfinished.startswith(_START) or _START.startswith(unfinished)):
        number = records.index(None) + 1 if None in records else len(lines) + 1
        message = f"{path}: line {number} is no record of a training step; move the file away to begin a new log"
        raise FileError(message)
    return [record for record in records if record is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
