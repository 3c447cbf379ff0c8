"""Steps by the kernels that take all of one, in Triton's interpreter and on a GPU, against whole rows by the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cache import interpreted_decoding
from tests.support.interpreter import Interpret
from tests.support.triton_decoding import CASES


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_whole_sequences(name: str, compute: Interpret) -> None:
    """As near to float64 as the oracle in the same precision, and the same blocks."""
    found = compute(interpreted_decoding, name)
    case = CASES[name]
    lengths = [
        [start + count for start, count in zip(case.starts(row), counts, strict=True)]
        for row, counts in enumerate(zip(*case.steps, strict=True))
    ]
    assert found["lengths"] == [after[-1] for after in lengths]
    assert found["reached"] == [max(prompt, *after) for prompt, after in zip(case.prompts, lengths, strict=True)]
    if "blocks" in found:
        assert torch.equal(found["blocks"], found["exact_blocks"])
    plain, ours = (_distance(found[key], found["exact"]) for key in ("plain", "out"))
    assert ours <= 1.5 * plain, (ours, plain)
    resolution = torch.finfo(case.dtype).eps
    assert bool(found["pages"]) == (case.page_size is not None)
    for kept, exact in found["buffers"] + found["pages"]:
        torch.testing.assert_close(kept, exact, rtol=4 * resolution, atol=4 * resolution)


def _distance(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def test_tokens_without_capacity_are_nan_and_not_kept(interpret: Interpret) -> None:
    found = interpret(interpreted_decoding, "over the end")
    assert found["out"].isnan().all(-1).tolist() == [[False, True], [False, False]]
    kept = found["out"].isfinite()
    torch.testing.assert_close(found["out"][kept], found["whole"][kept], rtol=0, atol=1e-6)
    assert found["lengths"] == [10, 5]


@pytest.mark.parametrize("branches", ["all", "two"])
def test_a_layer_that_follows_steps_by_the_blocks_of_another(branches: str, interpret: Interpret) -> None:
    found = interpret(interpreted_decoding, "a layer that follows")
    torch.testing.assert_close(found[f"{branches}, steps"], found[f"{branches}, whole"], rtol=0, atol=1e-5)


def test_lengths_may_lie_apart_in_memory(interpret: Interpret) -> None:
    for given, lengths in interpret(interpreted_decoding, "lengths apart").values():
        assert lengths == given


def test_nan_stays_in_its_sequence_until_it_is_cropped(interpret: Interpret) -> None:
    found = interpret(interpreted_decoding, "no numbers")
    assert found["draft"].isnan().all(-1).tolist() == [[False, False], [True, True]]
    torch.testing.assert_close(found["after"], found["whole"], rtol=0, atol=1e-6)


def test_a_compiled_step_is_one_graph(interpret: Interpret) -> None:
    assert interpret(interpreted_decoding, "compiled") == {"same": True, "graphs": 1}
