"""The kernels that a number of queries is given to: a table, of which each row is one side of a threshold."""

from __future__ import annotations

import pytest

from flexnsa.attention.thresholds import Queries

CASES = [
    # tokens, heads of a group, CUDA, mod: divide_keys, fit_tile, share_keys, are_gathered
    ((1, 4, True, False), (True, True, False, True)),
    ((7, 16, True, True), (True, False, False, False)),
    ((8, 16, True, False), (False, True, False, True)),
    ((3, 17, True, False), (True, True, False, True)),
    ((4, 17, True, False), (False, True, False, True)),
    ((16, 8, True, False), (False, True, False, True)),
    ((17, 8, True, False), (False, False, False, False)),
    ((64, 4, True, False), (False, False, False, False)),
    ((65, 4, True, False), (False, False, True, False)),
    ((65, 4, True, True), (False, False, False, False)),
    ((65, 1, True, False), (False, True, True, False)),
    ((1, 4, False, False), (False, True, False, True)),
    ((16, 4, False, True), (False, False, False, False)),
    ((65, 4, False, False), (False, False, False, False)),
]


@pytest.mark.parametrize(("queries", "expected"), CASES)
def test_thresholds_choose_the_kernels(queries: tuple[int, int, bool, bool], expected: tuple[bool, ...]) -> None:
    count, group, is_cuda, has_mod = queries
    found = Queries(count, 2 * group, 2, is_cuda, has_mod)
    assert (found.divide_keys, found.fit_tile, found.share_keys, found.are_gathered) == expected
