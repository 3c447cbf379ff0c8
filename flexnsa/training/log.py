"""The log of a run: one JSON object a line, cut back to the checkpoint when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JSONLog:
    """Append-only records, each with a ``step``.

    Args:
        path: the file; made if it is not there.
        resume_step: records of this step and later are dropped, for the run will write them again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = [record for record in read_log(path) if record["step"] < resume_step] if path.exists() else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it is in the file when this returns."""
        self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; one that a killed run left unfinished is no record."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
