"""The same few steps in every combination of some settings, each in its own processes and folder."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexnsa.files import write_whole
from flexnsa.lm.checkpoint.checksum import sealed, unsealed
from flexnsa.lm.diagnosis.cases import Outcome
from flexnsa.lm.diagnosis.environment import environment
from flexnsa.lm.measure.table import format_table

OUTCOME = "outcome.json"
EQUAL = ("impl", "checkpointing", "recompute", "parallel", "ranks", "compiled")
"""Axes along which a step computes the same."""

_PACKAGE = Path(__file__).parents[2]
_VERSIONS = ("device", "python", "torch", "triton")

Point = dict[str, Any]
"""A value of each axis, by name."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The points of a matrix, and their outcomes."""

    cases: list[tuple[Point, Outcome]]

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(outcome.passed for _, outcome in self.cases)

    def sentence(self) -> str:
        """Count the cases that passed, name the others, and give the spread of cases that compute the same."""
        words = [f"{sum(outcome.passed for _, outcome in self.cases)} of {len(self.cases)} cases passed"]
        for status in ("failed", "over time"):
            names = [name_of(point) for point, outcome in self.cases if outcome.status == status]
            words += [f"{status}: {'; '.join(names)}"] if names else []
        spread = self.spread()
        words += [] if spread is None else [f"losses of cases that compute the same differ by at most {spread:.1e}"]
        return "; ".join(words) + "."

    def spread(self) -> float | None:
        """Return the largest relative difference of last losses of cases that differ along axes of ``EQUAL`` only."""
        alike: dict[str, list[float]] = {}
        for point, outcome in self.cases:
            if outcome.values.get("losses"):
                key = name_of({axis: value for axis, value in point.items() if axis not in EQUAL})
                alike.setdefault(key, []).append(outcome.values["losses"][-1])
        return max(((max(losses) - min(losses)) / max(map(abs, losses)) for losses in alike.values()), default=None)

    def table(self) -> str:
        """Return a table with a line for each case."""
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
        """Return plain values."""
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
    """Run all combinations one after the other, but for those with an outcome in ``folder``.

    An outcome is kept with the device, the versions of Python, PyTorch and Triton, and a hash of this package: where
    one of them differs, the case runs again.

    Args:
        folder: gets a folder for each case, named by :func:`name_of`.
        axes: names of what is varied, and the values of each; they name folders and are kept as JSON.
        run: runs a case, from its point and its folder, such as by :func:`flexnsa.lm.diagnosis.run_case`.
        about: anything else that decides a case, such as a hash of the text; where it differs, the case runs again.
        retry: run cases again that did not pass.
        report: called with a line for each case that has ended.
    """
    points = combine(axes)
    cases: list[tuple[Point, Outcome]] = []
    code = versions()
    for number, point in enumerate(points, 1):
        file = folder / name_of(point) / OUTCOME
        settings = json.loads(json.dumps({"point": point, "about": about, "versions": code}))
        outcome = _earlier(file, settings)
        if outcome is None or (retry and not outcome.passed):
            file.parent.mkdir(parents=True, exist_ok=True)
            outcome = run(point, file.parent)
            write_whole(file, sealed(asdict(outcome) | settings, indent=1))
            took = f"{outcome.status} in {outcome.seconds:.1f} s {outcome.reason}"
            report(f"{number}/{len(points)} {file.parent.name}: {took}")
        cases.append((point, outcome))
    return Matrix(cases)


def combine(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Return all combinations of the values of axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def name_of(point: Point) -> str:
    """Return a name for the folder of a point."""
    return ",".join(f"{axis}={in_words(value)}" for axis, value in point.items()).replace("/", "-")


def in_words(value: Any) -> str:
    """Return a value as on the command line."""
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _earlier(file: Path, settings: dict[str, Any]) -> Outcome | None:
    """Return the outcome of the same case in an earlier start, unless its file is damaged."""
    if not file.exists():
        return None
    try:
        record, _ = unsealed(file.read_bytes())
    except ValueError:
        return None
    return Outcome(**record) if all(record.pop(name, None) == value for name, value in settings.items()) else None


def versions() -> dict[str, Any]:
    """Return the code and the device that decide an outcome besides its settings, as plain values."""
    found = environment()
    return {"flexnsa_sha256": source_sha256()} | {name: found[name] for name in _VERSIONS}


def source_sha256(package: Path = _PACKAGE) -> str:
    """Return a fingerprint of the Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
