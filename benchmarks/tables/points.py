"""Recorded points by what tells them apart, and how tables write what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.harness.options import RESULTS

Point = dict[str, Any]
Rows = list[list[str]]
"""The cells of a table, its header first."""


def read_record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def points_by(recording: str, *fields: str, **values: Any) -> dict[Any, Point]:
    """Return the points that have these values, by one field, or by several as a tuple."""
    points = [point for point in read_record(recording)["points"] if values.items() <= point.items()]
    return {tuple(point[field] for field in fields) if fields[1:] else point[fields[0]]: point for point in points}


def cells(values: Iterable[float], spec: str) -> list[str]:
    return [format(value, spec) for value in values]


def total(point: Point) -> float:
    """Return milliseconds of forward and backward."""
    return point["forward_ms"] + point["backward_ms"]


def passes(point: Point) -> str:
    """Write milliseconds, forward / backward."""
    return f"{point['forward_ms']:.1f} / {point['backward_ms']:.1f}"


def lengths(tokens: Iterable[int]) -> list[str]:
    """Write numbers of tokens, from 1,024 on in multiples of it."""
    return [f"{length // 1024}k" if length >= 1024 else f"{length}" for length in tokens]
