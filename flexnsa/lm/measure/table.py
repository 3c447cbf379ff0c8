"""What a command reports, and tables for the terminal: the first column is aligned left, the others right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command reports.

    Args:
        sentence: the result.
        table: what the sentence summarizes; empty for nothing more.
        record: the result as plain values that JSON can hold.
        passed: whether there is no problem; else the command exits with status 1.
    """

    sentence: str
    table: str
    record: dict[str, Any]
    passed: bool = True


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
