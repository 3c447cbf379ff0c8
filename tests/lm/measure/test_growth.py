"""Crossovers, slopes and curves, read off recorded points."""

from __future__ import annotations

import pytest

from flexnsa.lm.measure.growth import crossover, curves, growth_of, slopes


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
