"""The same few steps in every combination of some settings, each in processes and a folder of its own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexnsa.diagnostics.cases import OUTCOME, Outcome
from flexnsa.files import write_whole
from flexnsa.measure.table import format_table

CASE = "case.json"
EQUAL = ("impl", "checkpointing", "recompute", "parallel", "ranks", "compiled")
"""Axes along which a step stays the same step."""

Point = dict[str, Any]
"""The value of each axis."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The points of a matrix, and how each has ended."""

    cases: list[tuple[Point, Outcome]]

    @property
    def passed(self) -> bool:
        """Whether every case has."""
        return all(outcome.passed for _, outcome in self.cases)

    def sentence(self) -> str:
        """Say how many cases passed, which did not, and how far those that compute the same are apart."""
        words = [f"{sum(outcome.passed for _, outcome in self.cases)} of {len(self.cases)} cases passed"]
        for status in ("failed", "over time"):
            names = [name_of(point) for point, outcome in self.cases if outcome.status == status]
            words += [f"{status}: {'; '.join(names)}"] if names else []
        spread = self.spread()
        words += [] if spread is None else [f"losses of cases that compute the same differ by at most {spread:.1e}"]
        return "; ".join(words) + "."

    def spread(self) -> float | None:
        """Give the largest relative difference of last losses among cases that differ along axes of ``EQUAL`` alone."""
        alike: dict[str, list[float]] = {}
        for point, outcome in self.cases:
            if outcome.values.get("losses"):
                key = name_of({axis: value for axis, value in point.items() if axis not in EQUAL})
                alike.setdefault(key, []).append(outcome.values["losses"][-1])
        return max(((max(losses) - min(losses)) / max(map(abs, losses)) for losses in alike.values()), default=None)

    def table(self) -> str:
        """Show a line for each case."""
        axes = list(self.cases[0][0])
        rows = [
            [
                *(in_words(point[axis]) for axis in axes),
                outcome.status,
                f"{outcome.seconds:.1f}",
                *(f"{outcome.values[name]:,.4g}" if name in outcome.values else "" for name in ("loss", "peak_mib")),
                outcome.reason[:100],
            ]
            for point, outcome in self.cases
        ]
        return format_table([*axes, "", "seconds", "loss", "peak MiB", "because"], rows)

    def record(self) -> dict[str, Any]:
        """Give plain values."""
        return {"passed": self.passed, "cases": [{"point": point} | asdict(outcome) for point, outcome in self.cases]}


def run_matrix(
    folder: Path,
    axes: Mapping[str, Sequence[Any]],
    run: Callable[[Point, Path], Outcome],
    *,
    about: Mapping[str, Any] | None = None,
    retry: bool = False,
    report: Callable[[str], object] = lambda line: None,  # noqa: ARG005
) -> Matrix:
    """Run all combinations one after the other, but for those that ``folder`` holds already.

    Args:
        folder: with a folder for each case below it, named by :func:`name_of`.
        axes: what is varied, and the values of each; they name folders and are kept as JSON.
        run: a case by its point and its folder, such as by :func:`flexnsa.diagnostics.run_case`.
        about: whatever else decides a case; one that was run with something else is run again.
        retry: run again what has not passed.
        report: called with a line for each case that has ended.
    """
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cases: list[tuple[Point, Outcome]] = []
    for number, point in enumerate(points, 1):
        own = folder / name_of(point)
        asked = json.loads(json.dumps({"point": point, "about": about}))
        outcome = _earlier(own, asked)
        if outcome is None or (retry and not outcome.passed):
            own.mkdir(parents=True, exist_ok=True)
            (own / OUTCOME).unlink(missing_ok=True)
            write_whole(own / CASE, json.dumps(asked, indent=1) + "\n")
            outcome = run(point, own)
            report(f"{number}/{len(points)} {own.name}: {outcome.status} in {outcome.seconds:.1f} s {outcome.reason}")
        cases.append((point, outcome))
    return Matrix(cases)


def name_of(point: Point) -> str:
    """Name a point, so that a folder can have the name."""
    return ",".join(f"{axis}={in_words(value)}" for axis, value in point.items()).replace("/", "-")


def in_words(value: Any) -> str:
    """Write a value as the command line has it."""
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _earlier(folder: Path, asked: dict[str, Any]) -> Outcome | None:
    """Give how the same case ended in an earlier start, if it did."""
    files = folder / CASE, folder / OUTCOME
    if not all(file.exists() for file in files):
        return None
    case, outcome = (json.loads(file.read_text()) for file in files)
    return Outcome(**outcome) if case == asked else None
