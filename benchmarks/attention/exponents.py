"""Exponents of the length, fitted to what is recorded: memory and time of every attention and of every phase of ours.

    python -m benchmarks attention.exponents benchmarks/results/attention_h200.json

An exponent is the slope of a least-squares line in log-log axes; behind it, how many lengths it is from and how far the
worst is from the line. What reads ``S / d`` compressed keys a query is quadratic in time, with a small constant: its
time, and that of dense attention, is also fitted as ``c + a S + b S^2``, where three lengths are recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.growth import Curve, curves, fit_power_law
from benchmarks.harness.options import RESULTS
from flexnsa.lm.measure.table import format_table

QUANTITIES = {
    "saved_mib": "saved",
    "peak_mib": "peak",
    "resident_mib": "resident peak",
    "forward_ms": "forward",
    "backward_ms": "backward",
}
KEYS_OF_THE_PAST = ("NSA", "cmp branch", "score", "score and select", "cuDNN SDPA", "flash SDPA", "dense Flex")
"""Those whose work grows with the number of (query, key) pairs."""


@dataclass(frozen=True, slots=True)
class Polynomial:
    """``fixed + linear * S + quadratic * S ** 2``; the residual is the largest distance of a point, relative to it."""

    fixed: float
    linear: float
    quadratic: float
    residual: float

    @property
    def half_at(self) -> float:
        """The length from which on the quadratic part is more than half of the whole."""
        if not self.quadratic:
            return math.inf
        return (self.linear + math.sqrt(self.linear**2 + 4 * self.quadratic * self.fixed)) / (2 * self.quadratic)


def fit_polynomial(curve: Curve) -> Polynomial:
    """Fit by least squares of relative errors, fewer terms than points, none of them negative.

    Raises:
        ValueError: there are fewer than three lengths, which any two terms fit.
    """
    if len(curve) < 3:
        raise ValueError(f"curve: expected three lengths at least, got {dict(curve)}")
    length, value = (torch.tensor(list(column), dtype=torch.float64) for column in (curve.keys(), curve.values()))
    terms = torch.stack([length**power / value for power in range(3)], dim=1)
    fits = []
    for count in range(1, min(3, len(curve) - 1) + 1):
        for chosen in itertools.combinations(range(3), count):
            fit = torch.zeros(3, dtype=torch.float64)
            fit[list(chosen)] = torch.linalg.lstsq(terms[:, chosen], torch.ones_like(value)[:, None]).solution[:, 0]
            if (fit >= 0).all():
                fits.append(fit)
    best = min(fits, key=lambda fit: (terms @ fit - 1).square().sum().item())
    fixed, linear, quadratic = best.tolist()
    return Polynomial(fixed, linear, quadratic, residual=(terms @ best - 1).abs().max().item())


def exponents_table(points: Sequence[dict[str, Any]]) -> str:
    """A line of every attention or phase: each quantity's exponent (how many lengths, and its residual)."""
    by_name = curves(points, QUANTITIES)
    shown = [quantity for quantity in QUANTITIES if any(quantity in column for column in by_name.values())]
    rows = [[name, *(_exponent(column.get(quantity, {})) for quantity in shown)] for name, column in by_name.items()]
    return format_table(["exponent of S", *(QUANTITIES[quantity] for quantity in shown)], rows)


def quadratic_table(points: Sequence[dict[str, Any]]) -> str:
    """Where time is quadratic: its constant, and from which length on it is most of the time."""
    rows = []
    for name, column in curves(points, QUANTITIES).items():
        for quantity in ("forward_ms", "backward_ms"):
            curve = column.get(quantity, {})
            if name in KEYS_OF_THE_PAST and len(curve) > 2:
                fit = fit_polynomial(curve)
                terms = [f"{fit.fixed:.2f}", f"{1e3 * fit.linear:.3f}", f"{1e9 * fit.quadratic:,.2f}"]
                half = "never" if fit.half_at == math.inf else f"{fit.half_at:,.0f}"
                rows.append([name, QUANTITIES[quantity], *terms, half, f"{fit.residual:.1%}"])
    header = ["c + a S + b S^2", "", "c, ms", "a, us", "b, ps", "half of it b S^2 from S", "off by"]
    return format_table(header, rows) if rows else ""


def _exponent(curve: Curve) -> str:
    if len(curve) < 2:
        return "-"
    fit = fit_power_law(curve.items())
    residual = f", off by {fit.residual:.1%}" if len(curve) > 2 else ""
    return f"{fit.exponent:.2f} ({len(curve)}{residual})"


def report(record: dict[str, Any]) -> str:
    """Tables of one recording, its environment below."""
    points = [point for point in record["points"] if "name" in point and "seq_len" in point]
    parts = [exponents_table(points), quadratic_table(points)]
    environment = "{device}, {threads} threads, torch {torch}, commit {commit}".format(**record["environment"])
    return "\n\n".join([*(part for part in parts if part), environment])


def main(argv: Sequence[str] | None = None) -> None:
    default = [RESULTS / f"{name}.json" for name in ("attention_h200", "h200", "memory_training", "cpu_throughput")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=default, help="default: those that are recorded")
    for file in parser.parse_args(argv).files:
        if file in default and not file.exists():
            continue
        print(f"{file}\n\n{report(json.loads(file.read_text()))}\n")


if __name__ == "__main__":
    main()
