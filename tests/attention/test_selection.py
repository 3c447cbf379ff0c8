"""Which blocks are selected: ties, forced blocks, groups, and what a query is looking for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexnsa import NSAConfig, check_block_indices, select_blocks
from flexnsa.attention.selection import Ranking
from flexnsa.config import num_compressed
from tests.support.inputs import SMALL, attend, make_inputs

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])


@impls
def test_ties_go_to_the_lower_block_index(impl: str) -> None:
    """Keys that repeat with the blocks: all inner blocks that lie wholly in the past score exactly the same."""
    config = replace(SMALL, compress_block_size=4, num_init_blocks=1, num_local_blocks=1, num_selected_blocks=4)
    q = torch.randn(1, 1, 1, 16).expand(1, 4, 160, 16)
    k_cmp = torch.randn(1, 2, 4, 16).repeat(1, 1, 10, 1)
    blocks = select_blocks(q, k_cmp, config=config, impl=impl)
    for t in range(64, 160):
        assert blocks[0, :, t].tolist() == [[0, 1, 2, t // 16]] * 2, t
    ranked = Ranking(torch.tensor([[90, 159]]), 10, config=config).choose(torch.ones(1, 2, 2, 40))
    assert ranked.sort().values.tolist() == [[[[0, 1, 2, 5], [0, 1, 2, 9]]] * 2]


@impls
def test_forced_blocks_are_there_and_count(impl: str) -> None:
    config = replace(SMALL, num_init_blocks=2, num_local_blocks=3, num_selected_blocks=6)
    x = make_inputs(200, config)
    blocks = select_blocks(x.q, x.k_cmp, config=config, impl=impl)
    for t in range(200):
        current, row = t // 16, blocks[0, 0, t].tolist()
        assert {0, 1} & set(range(current + 1)) <= set(row)
        assert set(range(max(0, current - 2), current + 1)) <= set(row)
        assert sum(j >= 0 for j in row) == min(6, current + 1)


@impls
def test_a_planted_key_is_found(impl: str) -> None:
    """The block that contains the one key that the query looks for is selected, wherever it lies."""
    config = replace(SMALL, num_selected_blocks=4)
    for needle in range(16, 128, 8):
        q = torch.zeros(1, 2, 160, 16)
        q[..., 0] = 10.0
        k_cmp = torch.randn(1, 1, num_compressed(160, config), 16) * 0.1
        k_cmp[:, :, needle // 4, 0] = 10.0  # covers tokens needle .. needle + 7, one block
        blocks = select_blocks(q, k_cmp, config=config, impl=impl)
        assert needle // 16 in blocks[0, 0, 159].tolist()


@impls
def test_heads_of_a_group_vote_together(impl: str) -> None:
    """A block that two heads like a little beats one that one head likes and the other does not."""
    config = replace(SMALL, compress_block_size=4, num_init_blocks=0, num_local_blocks=1, num_selected_blocks=2)
    k_cmp = torch.zeros(1, 1, num_compressed(96, config), 4)
    k_cmp[0, 0, 4 * 1, 0] = 6.0  # block 1: what head 0 likes best
    k_cmp[0, 0, 4 * 2, 1] = 6.0  # block 2: what head 1 likes best
    k_cmp[0, 0, 4 * 3, :2] = 5.9  # block 3: what both like nearly as much
    q = torch.zeros(1, 2, 96, 4)
    q[0, 0, :, 0] = q[0, 1, :, 1] = 2.0
    assert select_blocks(q, k_cmp, config=config, scale=1.0, impl=impl)[0, 0, 95].tolist() == [3, 5]


@impls
def test_selection_is_not_differentiated(impl: str) -> None:
    x = make_inputs(40).to(torch.float64)
    assert not select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl).requires_grad
    shut = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand_as(x.gates)
    out = attend(x.replace(gates=shut), impl=impl)
    assert (torch.autograd.grad(out.sum(), x.k_cmp, allow_unused=True, materialize_grads=True)[0] == 0).all()


CHECKED = NSAConfig(compress_block_size=4, compress_stride=2, select_block_size=4, num_selected_blocks=4, window_size=4)


@pytest.mark.parametrize("row", [[0, 1, 2, 4], [0, 2, -1, -1], [-1, -1, -1, -1], [3, -1, -1, -1]])
def test_indices_in_order_pass_the_check(row: list[int]) -> None:
    check_block_indices(torch.tensor([[[row]]], dtype=torch.int32), config=CHECKED, seq_len=17)


@pytest.mark.parametrize(
    "row", [[0, 1, 1, -1], [1, 0, -1, -1], [0, -1, 2, -1], [0, 1, 2, 5], [-2, 0, 1, 2], [0, 4, 5, -1], [-1, 0, 1, 2]]
)
def test_indices_out_of_order_or_range_fail_the_check(row: list[int]) -> None:
    indices = torch.tensor([[[[0, 1, 2, 3], row]]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_indices: expected .* got .* at \[0, 0, 1\]"):
        check_block_indices(indices, config=CHECKED, seq_len=17)


@impls
def test_selection_does_not_see_future_compressed_tokens(impl: str) -> None:
    """A softmax over all compressed tokens let the future into the scores; a loud one then swallowed the past."""
    x = make_inputs(150)
    whole = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
    loud = x.k_cmp.clone()
    loud[:, :, num_compressed(100, SMALL) :] *= 1e4
    assert torch.equal(select_blocks(x.q, loud, config=SMALL, impl=impl)[:, :, :100], whole[:, :, :100])
