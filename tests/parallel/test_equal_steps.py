"""However many processes share a step, it is the step of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from flexnsa.lm.parallel import Ranks
from flexnsa.packing import IGNORED
from tests.parallel.conftest import RunOnce
from tests.parallel.steps import CASES, COMPILED, ON_FOUR, ON_TWO, make_trainer, train, train_cases

TOLERANCE = 1e-5
GROUPS = {("ddp", 2): tuple(CASES), ("fsdp2", 2): tuple(CASES), ("fsdp2", 4): ON_FOUR}
"""The cases of each kind and number of ranks."""
Results = Callable[[str, int], dict[str, Any]]
Alone = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(run_once: RunOnce) -> Results:
    """Return what a group of ranks has seen."""
    return lambda parallel, size: run_once(size, train_cases, parallel)


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Return what one process has seen."""

    @cache
    def get(case: str) -> dict[str, Any]:
        options = (CASES | ON_TWO)[case]
        return train(Ranks(), {name: value for name, value in options.items() if name != "compiled"})

    return get


@pytest.mark.parametrize(
    ("parallel", "size", "case"), [(*group, case) for group, cases in GROUPS.items() for case in cases]
)
def test_any_number_of_ranks_takes_the_steps_of_one_process(
    results: Results, alone: Alone, parallel: str, size: int, case: str
) -> None:
    assert_same_steps(results(parallel, size)[case], alone(case))


def test_compiled_layers_take_the_same_steps_and_are_one_graph(results: Results, alone: Alone) -> None:
    result = results("ddp", 2)[COMPILED]
    assert_same_steps(result, alone(COMPILED))
    assert result["graphs"] == (2, 0)  # of training, and of validation


@pytest.mark.parametrize(("parallel", "size"), GROUPS)
def test_every_parameter_gets_a_gradient_on_every_step(results: Results, parallel: str, size: int) -> None:
    without = {case: results(parallel, size)[case]["without gradient"] for case in GROUPS[parallel, size]}
    dense = without.pop("stages")  # which leaves out branches, and does not teach indexers
    assert not any(".attention." not in name or "_slc" in name for name in dense)
    assert without == {case: set() for case in without}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_gradients_summed_in_bf16_are_rounded_and_no_more(results: Results, parallel: str) -> None:
    rounded, exact = (results(parallel, 2)[case]["steps"][0] for case in ("summed in bf16", "plain"))
    assert rounded.loss == exact.loss
    assert rounded.grad_norm != exact.grad_norm
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=2**-8)


@pytest.mark.parametrize(("parallel", "size"), GROUPS)
def test_steps_after_a_checkpoint_are_those_without_one_bit_for_bit(results: Results, parallel: str, size: int) -> None:
    for without, after in results(parallel, size)["going on"]:
        assert without == after


@pytest.mark.parametrize(("parallel", "size"), GROUPS)
def test_a_nan_on_one_rank_stops_all_before_the_parameters_change(results: Results, parallel: str, size: int) -> None:
    everyone = results(parallel, size)["NaN"]
    assert len(everyone) == size
    for said, stayed in everyone:
        assert said.startswith("step 1: loss nan")
        assert stayed


@pytest.mark.parametrize("size", [2, 4])
def test_shards_come_with_the_buffers_that_rank_0_has_drawn(results: Results, size: int) -> None:
    everyone = results("fsdp2", size)["buffers"]
    assert len(everyone) == size
    for buffers in everyone:
        assert buffers["layers.0.kept"].tolist() == [0, 1, 2, 3, 4]
        assert buffers["layers.0.not_kept"].tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_what_is_tied_are_what_rank_0_has_drawn(results: Results, size: int) -> None:
    assert results("fsdp2", size)["tied"] == [True] * size


@pytest.mark.parametrize("size", [2, 4])
def test_compressors_begin_as_the_mean_where_shards_are_reset(results: Results, size: int) -> None:
    assert results("fsdp2", size)["reset on meta"] == [[True] * 4] * size


def test_ranks_have_unequal_numbers_of_targets_so_that_dividing_by_their_own_would_show() -> None:
    trainer = make_trainer(Ranks(), pack=True)
    batch = trainer.training_rows.spread(4)
    counts = [(row != IGNORED).sum().item() for row in batch.targets]
    assert max(counts) > 1.2 * min(counts)


def assert_same_steps(result: dict[str, Any], alone: dict[str, Any]) -> None:
    """Check that losses and parameters are equal, and that parameters changed by much more than they may differ."""
    for one, other in zip(result["steps"], alone["steps"], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=TOLERANCE)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=10 * TOLERANCE)
        if other.selection_loss is not None:
            # A divergence is a sum of differences of logs of about 1.
            assert one.selection_loss == pytest.approx(other.selection_loss, rel=TOLERANCE, abs=1e-7)
            assert one.selection_grad_norm == pytest.approx(other.selection_grad_norm, rel=10 * TOLERANCE, abs=1e-6)
    assert result["bits"] == pytest.approx(alone["bits"], rel=TOLERANCE)
    for name, after in alone["after"].items():
        torch.testing.assert_close(result["before"][name], alone["before"][name], rtol=0, atol=0)
        torch.testing.assert_close(result["after"][name], after, rtol=0, atol=TOLERANCE)
    assert max((after - alone["before"][name]).abs().max() for name, after in alone["after"].items()) > 2e-3
