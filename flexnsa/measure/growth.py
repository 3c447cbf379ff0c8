"""How a quantity grows with the sequence length: a power law, fitted to measurements, and how far they are from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from statistics import fmean


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """``constant * S ** exponent``, a line in log-log axes.

    Args:
        exponent: 1 doubles with the length, 2 quadruples.
        constant: value at ``S = 1``.
        residual: largest distance of a measurement from the fit, relative to the fit.
    """

    exponent: float
    constant: float
    residual: float


def fit_power_law(points: Iterable[tuple[int, float]]) -> PowerLaw:
    """Fit ``(S, value)`` pairs by least squares of the logarithms.

    Raises:
        ValueError: there are fewer than two lengths, or a value that is not positive.
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
