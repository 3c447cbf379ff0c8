"""However many ranks share the tokens of a row, what is learnt from it is what one process learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.config import num_compressed
from flexnsa.lm.parallel import Ranks
from flexnsa.parallel.chunks import check_chunks
from tests.parallel.conftest import RunOnce
from tests.parallel.sequences import (
    LAYERS,
    MODS,
    PACKED,
    ROW,
    TRAINED,
    TRAINED_ROW,
    compare_compiled,
    compare_sequences,
    train_all,
)
from tests.parallel.steps import train
from tests.parallel.test_equal_steps import assert_same_steps
from tests.support.inputs import SMALL

SIZES = [2, 4]
Results = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(run_once: RunOnce) -> Results:
    return lambda size: run_once(size, compare_sequences)


@pytest.fixture(scope="module")
def trained(run_once: RunOnce) -> Results:
    return lambda size: run_once(size, train_all)


@pytest.mark.parametrize("case", [*LAYERS, *MODS, *PACKED, "layout"])
@pytest.mark.parametrize("size", SIZES)
def test_output_and_every_gradient_are_those_of_whole_rows(results: Results, size: int, case: str) -> None:
    assert_same(*results(size)["layers"][case])


def test_a_compiled_layer_is_that_of_whole_rows_and_its_collectives_are_in_one_graph(run_once: RunOnce) -> None:
    compiled = run_once(2, compare_compiled)
    assert_same(*compiled["layer"])
    assert compiled["graphs"] == (1, 0)


def assert_same(one: dict[str, Tensor], spread: dict[str, Tensor]) -> None:
    assert one.keys() == spread.keys()
    for name, want in one.items():
        want = want.expand_as(spread[name])  # every rank has the whole selection loss
        torch.testing.assert_close(spread[name], want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_of_others_all_selected_and_compressed_keys_and_halos(results: Results, size: int) -> None:
    tokens = ROW + 2 * size * (SMALL.window_size - 1) + 2 * size * (SMALL.compress_block_size - SMALL.compress_stride)
    rows = tokens + ROW // SMALL.compress_stride
    assert num_compressed(ROW, SMALL) <= ROW // SMALL.compress_stride
    assert results(size)["layers"]["volume"] == 2 * 2 * (8 + 8) * rows  # of 2 rows of a batch and 2 heads of 8 numbers


@pytest.mark.parametrize(("size", "way"), [(size, way) for size in SIZES for way in TRAINED[size]])
def test_steps_of_ranks_that_share_tokens_are_those_of_one_process(trained: Results, size: int, way: str) -> None:
    _, _, options = TRAINED[size][way]
    found = trained(size)[way]
    alone = {name: value for name, value in options.items() if name != "compiled"}
    assert_same_steps(found, train(Ranks(), TRAINED_ROW | alone))
    assert found["without gradient"] == set()
    if "compiled" in options:
        assert found["graphs"] == (2, 0)  # of training, and of validation


@pytest.mark.parametrize("size", SIZES)
def test_rows_come_back_in_their_order(results: Results, size: int) -> None:
    assert results(size)["round trip"]


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


def test_what_ranks_cannot_share_is_refused_by_name(results: Results) -> None:
    refused = results(2)["refused"]
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
