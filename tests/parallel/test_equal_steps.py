"""However many processes share a step, or the tokens of a row, what is learnt is what one process learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.config import num_compressed
from flexnsa.lm.parallel import Ranks
from flexnsa.packing import IGNORED
from flexnsa.parallel.chunks import check_chunks
from tests.parallel.conftest import RunOnce
from tests.parallel.sequences import LAYERS, MODS, PACKED, ROW, TRAINED, TRAINED_ROW, compare_sequences, train_all
from tests.parallel.steps import CASES, COMPILED, ON_FOUR, ON_TWO, make_trainer, train, train_cases
from tests.support.inputs import SMALL

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
    assert without.pop("indexers alone", {"embedding.weight", "head.weight"}) >= {"embedding.weight", "head.weight"}
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
def test_shards_have_what_rank_0_has_and_are_reset_as_the_mean_and_generate_as_the_whole(results: Results, size: int):
    found = results("fsdp2", size)
    assert len(found["buffers"]) == size
    for buffers in found["buffers"]:
        assert buffers["layers.0.kept"].tolist() == [0, 1, 2, 3, 4]
        assert buffers["layers.0.not_kept"].tolist() == [[0.5] * 3] * 2
    assert found["tied"] == found["generated"] == [True] * size
    assert found["reset on meta"] == [[True] * 4] * size


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


SIZES = [2, 4]
OfSize = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def shared(run_once: RunOnce) -> OfSize:
    return lambda size: run_once(size, compare_sequences)


@pytest.fixture(scope="module")
def trained(run_once: RunOnce) -> OfSize:
    return lambda size: run_once(size, train_all)


@pytest.mark.parametrize("case", [*LAYERS, *MODS, *PACKED, "layout"])
@pytest.mark.parametrize("size", SIZES)
def test_output_and_every_gradient_are_those_of_whole_rows(shared: OfSize, size: int, case: str) -> None:
    assert_same(*shared(size)["layers"][case])


def test_a_compiled_layer_is_that_of_whole_rows_and_its_collectives_are_in_one_graph(trained: OfSize) -> None:
    compiled = trained(2)["compiled"]
    assert_same(*compiled["layer"])
    assert compiled["graphs"] == (1, 0)


def assert_same(one: dict[str, Tensor], spread: dict[str, Tensor]) -> None:
    assert one.keys() == spread.keys()
    for name, want in one.items():
        want = want.expand_as(spread[name])  # every rank has the whole selection loss
        torch.testing.assert_close(spread[name], want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_of_others_all_selected_and_compressed_keys_and_halos(shared: OfSize, size: int) -> None:
    tokens = ROW + 2 * size * (SMALL.window_size - 1) + 2 * size * (SMALL.compress_block_size - SMALL.compress_stride)
    rows = tokens + ROW // SMALL.compress_stride
    assert num_compressed(ROW, SMALL) <= ROW // SMALL.compress_stride
    assert shared(size)["layers"]["volume"] == 2 * 2 * (8 + 8) * rows  # of 2 rows of a batch and 2 heads of 8 numbers


@pytest.mark.parametrize(("size", "way"), [(size, way) for size in SIZES for way in TRAINED[size]])
def test_steps_of_ranks_that_share_tokens_are_those_of_one_process(trained: OfSize, size: int, way: str) -> None:
    _, _, options = TRAINED[size][way]
    found = trained(size)[way]
    alone = {name: value for name, value in options.items() if name != "compiled"}
    assert_same_steps(found, train(Ranks(), TRAINED_ROW | alone))
    assert found["without gradient"] == set()
    if "compiled" in options:
        assert found["graphs"] == (2, 0)  # of training, and of validation


@pytest.mark.parametrize("size", SIZES)
def test_rows_come_back_in_their_order(shared: OfSize, size: int) -> None:
    assert shared(size)["round trip"]


def test_chunks_are_as_long_as_what_their_branches_need_of_a_neighbour() -> None:
    behind = SMALL.compress_block_size - SMALL.compress_stride
    check_chunks("seq_len", 2 * behind, 2, SMALL, ("cmp", "slc"))
    check_chunks("seq_len", 2 * SMALL.window_size, 2, SMALL, ("win",))
    for tokens, branches, least in ((2 * behind, ("win",), SMALL.window_size - 1), (0, ("cmp",), behind)):
        with pytest.raises(ValueError, match=f"^seq_len: expected 2 chunks of at least {least} tokens"):
            check_chunks("seq_len", tokens, 2, SMALL, branches)
    indexed = replace(SMALL, index_heads=1, index_block_size=48, index_stride=16)
    check_chunks("seq_len", 64, 2, indexed, ("cmp", "slc"))
    for tokens in (32, 72):
        with pytest.raises(ValueError, match="least 32 tokens, in multiples of compress_stride=4 and index_stride=16"):
            check_chunks("seq_len", tokens, 2, indexed, ("cmp", "slc"))


def test_what_ranks_cannot_share_is_refused_by_name(shared: OfSize) -> None:
    refused = shared(2)["refused"]
    ours = "expected None of a layer whose tokens are spread over ranks, got"
    chunks = "seq_len: expected 2 chunks of at least 23 tokens, in multiples of compress_stride=4, got"
    assert refused["documents"] == "document_ids: expected ids that never decrease, got 1 before 0 at [0, 31]"
    assert refused["whole documents"] == "document_ids: expected shape (1, 64), got (1, 256)"
    assert refused["cache"] == f"cache: {ours} one"
    assert refused["short chunks"] == f"{chunks} 40 tokens"
    assert refused["uneven chunks"] == f"{chunks} 100 tokens"
    both = chunks.replace("compress_stride=4", "compress_stride=4 and index_stride=8")
    assert refused["index keys cut"] == f"{both} 56 tokens"
    assert refused["loss of a part"].startswith("layout: expected one of whole rows")
    spread = "tokens that are spread over ranks, as the layer has"
    assert refused["layout"] == f"layout: expected one of {spread}, got whole rows"
    again = "layer: expected one that has all of its tokens, got one that is parallelized already"
    assert refused["again"] == refused["model again"] == again
    assert refused["dense"] == "layer: expected NativeSparseAttention, got DenseAttention"
    assert refused["shard"].startswith("x: expected a multiple of 2 * 2 ranks tokens in dimension 1, got")
    assert refused["dimension"].startswith("seq_dim: expected a dimension of a tensor (1, 96, 48)")
    assert refused["mesh"] == "mesh: expected DeviceMesh, got None (NoneType)"
    assert refused["model"].startswith("model: expected Module, got ")
    assert refused["no layer"] == "model: expected layers of NativeSparseAttention, got none in Linear"
