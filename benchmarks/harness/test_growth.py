"""Crossovers, slopes and curves, read off recorded points."""

from __future__ import annotations

import pytest

from benchmarks.harness.growth import crossover, curves, fit_power_law, growth_of, slopes


def test_crossover_is_where_the_ratio_becomes_one_for_good() -> None:
    assert crossover({1024: 0.5, 2048: 2.0}) == pytest.approx(1024 * 2**0.5)
    assert crossover({1024: 2.0, 2048: 0.5, 4096: 2.0}) == pytest.approx(2048 * 2**0.5)
    assert crossover({1024: 1.1, 2048: 2.0}) == 1024
    assert crossover({1024: 2.0, 2048: 0.5}) is None
    assert crossover({}) is None


def test_slopes_are_per_doubling_however_far_lengths_are_apart() -> None:
    assert slopes({4096: 16.0, 1024: 1.0, 2048: 4.0}) == {"1024-2048": 2.0, "2048-4096": 2.0}
    assert slopes({1024: 1.0, 8192: 8.0}) == {"1024-8192": 1.0}
    assert slopes({1024: 1.0}) == {}


def test_curves_leave_out_what_was_not_measured() -> None:
    points = [
        {"name": "NSA", "seq_len": 2048, "ms": 4.0, "mib": 2.0},
        {"name": "NSA", "seq_len": 1024, "ms": 1.0},
        {"name": "dense", "seq_len": 1024, "label": "out of memory"},
    ]
    assert curves(points, ("ms", "mib")) == {"NSA": {"ms": {1024: 1.0, 2048: 4.0}, "mib": {2048: 2.0}}}
    ms = {"slopes": {"1024-2048": 2.0}, "exponent": 2.0, "largest_residual": 0.0}
    assert growth_of(points, ("ms", "mib")) == {"NSA": {"ms": ms}}


def test_power_law_is_found_and_what_is_none_is_told():
    fit = fit_power_law((length, 3 * length**2) for length in (1, 2, 4, 8))
    assert (fit.exponent, fit.constant, fit.residual) == (pytest.approx(2), pytest.approx(3), pytest.approx(0))
    assert fit_power_law([(1024, 5.0), (2048, 10.0)]).exponent == pytest.approx(1)
    # A line through the logarithms of 1, 2 * 1.5 ** 3, 4 has the slope of the first to the last.
    fit = fit_power_law([(1, 1.0), (2, 2 * 1.5**3), (4, 4.0)])
    assert (fit.exponent, fit.constant, fit.residual) == (pytest.approx(1), pytest.approx(1.5), pytest.approx(1.25))
    for points in ([(1024, 5.0)], [(1024, 5.0), (1024, 6.0)], [(1024, 0.0), (2048, 1.0)]):
        with pytest.raises(ValueError, match="points: expected positive values at two lengths"):
            fit_power_law(points)
