"""The selection loss in Triton, run by Triton's interpreter or a GPU, as exact as the plain formula beside float64."""

from __future__ import annotations

import pytest
import torch

from tests.support import triton_selection_loss
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.interpreter import Interpret
from tests.support.triton_selection_loss import CASES, by_implementation


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_as_exact_as_the_plain_formula(name: str, compute: Interpret) -> None:
    case, (got, again) = CASES[name], (compute(triton_selection_loss, name) for _ in range(2))
    assert all(torch.equal(value, again[key]) for key, value in got.items())
    plain = by_implementation("reference", case, case.inputs())
    want = by_implementation("reference", case, case.inputs(dtype=torch.float64))
    assert bool(want["total"] > 0) == (name != "shorter than a key")
    for names, factor in ((("total", "weight"), 2), (("k_cmp", "q_index"), 3)):
        chosen = ({key: x[key] for key in names if key in x} for x in (got, plain, want))
        assert_as_exact_as_plain(*chosen, factor=factor)
