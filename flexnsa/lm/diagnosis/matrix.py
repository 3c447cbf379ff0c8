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
from flexnsa.lm.measure.table import Report, format_table

CASE, OUTCOME = "case.json", "outcome.json"
EQUAL = ("impl", "checkpointing", "recompute", "parallel", "ranks", "compiled")
"""Axes along which a step computes the same."""

_PACKAGE = Path(__file__).parents[2]

Point = dict[str, Any]
"""A value of each axis, by name."""


@dataclass(frozen=True, kw_only=True)
class Matrix(Report):
    """The points of a matrix with their outcomes.

    Args:
        cases: in the order in which they were run.
        spread: largest relative difference of last losses of cases that differ along axes of ``EQUAL`` only; None
            without losses.
    """

    cases: list[tuple[Point, Outcome]]
    spread: float | None


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
        case = folder / name_of(point)
        settings = json.loads(json.dumps({"point": point, "about": about, "versions": code}))
        outcome = _earlier(case, settings)
        if outcome is None or (retry and not outcome.passed):
            case.mkdir(parents=True, exist_ok=True)
            (case / OUTCOME).unlink(missing_ok=True)
            write_whole(case / CASE, sealed(settings, indent=1))
            outcome = run(point, case)
            write_whole(case / OUTCOME, sealed(asdict(outcome), indent=1))
            report(f"{number}/{len(points)} {case.name}: {outcome.status} in {outcome.seconds:.1f} s {outcome.reason}")
        cases.append((point, outcome))
    return _matrix(cases)


def _matrix(cases: list[tuple[Point, Outcome]]) -> Matrix:
    """Count the cases that passed and name the others; the table has a line for each."""
    count = sum(outcome.passed for _, outcome in cases)
    passed, words = count == len(cases), [f"{count} of {len(cases)} cases passed"]
    for status in ("failed", "over time"):
        names = [name_of(point) for point, outcome in cases if outcome.status == status]
        words += [f"{status}: {'; '.join(names)}"] if names else []
    spread = _spread(cases)
    words += [] if spread is None else [f"losses of cases that compute the same differ by at most {spread:.1e}"]
    rows = [
        [
            *map(in_words, point.values()),
            outcome.status,
            f"{outcome.seconds:.1f}",
            *(f"{outcome.values[name]:,.4g}" if name in outcome.values else "" for name in ("loss", "peak_mib")),
            outcome.reason[:100],
        ]
        for point, outcome in cases
    ]
    return Matrix(
        sentence="; ".join(words) + ".",
        table=format_table([*cases[0][0], "", "seconds", "loss", "peak MiB", "because"], rows),
        record={"passed": passed, "cases": [{"point": point} | asdict(outcome) for point, outcome in cases]},
        passed=passed,
        cases=cases,
        spread=spread,
    )


def _spread(cases: list[tuple[Point, Outcome]]) -> float | None:
    alike: dict[str, list[float]] = {}
    for point, outcome in cases:
        if outcome.values.get("losses"):
            key = name_of({axis: value for axis, value in point.items() if axis not in EQUAL})
            alike.setdefault(key, []).append(outcome.values["losses"][-1])
    return max(((max(losses) - min(losses)) / max(map(abs, losses)) for losses in alike.values()), default=None)


def combine(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Return all combinations of the values of axes."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def name_of(point: Point) -> str:
    """Return a name for the folder of a point."""
    return ",".join(f"{axis}={in_words(value)}" for axis, value in point.items()).replace("/", "-")


def in_words(value: Any) -> str:
    """Return a value as on the command line."""
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _earlier(folder: Path, settings: dict[str, Any]) -> Outcome | None:
    """Return the outcome of the same case in an earlier start, if both files agree with their checksums."""
    try:
        case, outcome = (unsealed((folder / name).read_bytes()) for name in (CASE, OUTCOME))
    except (FileNotFoundError, ValueError):
        return None
    return Outcome(**outcome) if case == settings else None


def versions() -> dict[str, Any]:
    """Return the code and the device that decide an outcome besides its settings, as plain values."""
    here = environment()
    return {"flexnsa_sha256": source_sha256()} | {name: here[name] for name in ("device", "python", "torch", "triton")}


def source_sha256(package: Path = _PACKAGE) -> str:
    """Return a fingerprint of the Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
