"""Growth with the sequence length: power laws fitted to measurements, slopes, and crossings of curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean
from typing import Any

Curve = Mapping[int, float]
"""Values by length."""


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """The power law ``constant * S ** exponent``, a line in log-log axes.

    Args:
        exponent: 1 for a quantity that doubles with the length, 2 for one that quadruples.
        constant: value at ``S = 1``.
        residual: largest relative distance of a measurement from the fit.
    """

    exponent: float
    constant: float
    residual: float


def fit_power_law(points: Iterable[tuple[int, float]]) -> PowerLaw:
    """Fit ``(S, value)`` pairs by least squares of the logarithms.

    Raises:
        ValueError: there are fewer than two lengths, or a value is not positive.
    """
    points = list(points)
    if len({length for length, _ in points}) < 2 or any(value <= 0 for _, value in points):
        raise ValueError(f"points: expected positive values at two lengths at least, got {points}")
    x, y = zip(*((log2(length), log2(value)) for length, value in points), strict=True)
    x_mean, y_mean = fmean(x), fmean(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    exponent = covariance / sum((a - x_mean) ** 2 for a in x)
    intercept = y_mean - exponent * x_mean
    residual = max(abs(2 ** (b - intercept - exponent * a) - 1) for a, b in zip(x, y, strict=True))
    return PowerLaw(exponent, 2**intercept, residual)


def slopes(curve: Curve) -> dict[str, float]:
    """Return the slopes in log-log axes between neighbouring lengths."""
    pairs = itertools.pairwise(sorted(curve.items()))
    return {f"{a}-{b}": round(log2(high / low) / log2(b / a), 3) for (a, low), (b, high) in pairs}


def crossover(ratios: Curve) -> float | None:
    """Return the length from which on a ratio stays above 1, interpolated linearly in log-log axes.

    None if it is below 1 at the largest length; the smallest length if it is never below 1.
    """
    lengths = sorted(ratios, reverse=True)
    if not lengths or ratios[lengths[0]] < 1:
        return None
    for upper, lower in itertools.pairwise(lengths):
        if ratios[lower] < 1:
            high, low = log2(ratios[upper]), log2(ratios[lower])
            return lower * (upper / lower) ** (-low / (high - low))
    return float(lengths[-1])


def curves(points: Sequence[dict[str, Any]], quantities: Iterable[str]) -> dict[str, dict[str, dict[int, float]]]:
    """Return recorded points by ``name``, then by quantity: values by ``seq_len``, where there are any."""
    quantities = tuple(quantities)
    values: dict[str, dict[str, dict[int, float]]] = {}
    for point in sorted(points, key=lambda point: point["seq_len"]):
        for quantity in quantities:
            if point.get(quantity):
                values.setdefault(point["name"], {}).setdefault(quantity, {})[point["seq_len"]] = point[quantity]
    return values


def growth(curve: Curve) -> dict[str, Any]:
    """Return the slopes between neighbours and the power law of all points, as plain values."""
    fit = fit_power_law(curve.items())
    return {"slopes": slopes(curve), "exponent": round(fit.exponent, 3), "largest_residual": round(fit.residual, 4)}


def growth_of(points: Sequence[dict[str, Any]], quantities: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return :func:`growth` of every quantity of every name with at least two lengths."""
    return {
        name: {quantity: growth(curve) for quantity, curve in column.items() if len(curve) > 1}
        for name, column in curves(points, quantities).items()
    }
