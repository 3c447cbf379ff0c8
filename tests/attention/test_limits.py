"""Where the sparse attention is the dense one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexnsa import compressed_attention, select_blocks, selected_attention, sliding_window_attention
from tests.support.dense import causal, dense_attention
from tests.support.inputs import SMALL, make_inputs

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return dense_attention(q, k, v, causal(q.shape[2]))[0]


@impls
@pytest.mark.parametrize("num_selected", [5, 6, 50])
def test_all_blocks_selected_is_dense_attention(impl: str, num_selected: int) -> None:
    config = replace(SMALL, num_selected_blocks=num_selected)
    x = make_inputs(77)  # five blocks
    blocks = select_blocks(x.q, x.k_cmp, config=config, impl=impl)
    out, _ = selected_attention(x.q, x.k, x.v, blocks, config=config, impl=impl)
    torch.testing.assert_close(out, causal_attention(x.q, x.k, x.v))


@impls
def test_one_block_too_few_is_not(impl: str) -> None:
    x = make_inputs(77)
    blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
    out, _ = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
    same = (out - causal_attention(x.q, x.k, x.v))[0].abs().amax(-1) <= 1e-9
    assert same[:, :64].all()  # four blocks, four selected
    assert not same[:, 64:].any()


@impls
@pytest.mark.parametrize("window_size", [77, 78, 1000])
def test_a_window_over_everything_is_dense_attention(impl: str, window_size: int) -> None:
    x = make_inputs(77)
    config = replace(SMALL, window_size=window_size)
    out, _ = sliding_window_attention(x.q, x.k_win, x.v_win, config=config, impl=impl)
    torch.testing.assert_close(out, causal_attention(x.q, x.k_win, x.v_win))


@impls
def test_a_window_of_one_is_the_value_itself(impl: str) -> None:
    x = make_inputs(40)
    out, lse = sliding_window_attention(x.q, x.k_win, x.v_win, config=replace(SMALL, window_size=1), impl=impl)
    torch.testing.assert_close(out, x.v_win.repeat_interleave(2, dim=1))
    own_score = (x.q * x.k_win.repeat_interleave(2, dim=1)).sum(-1) / 4
    torch.testing.assert_close(lse.double(), own_score, rtol=1e-6, atol=1e-6)


@impls
def test_compression_of_single_tokens_is_dense_attention(impl: str) -> None:
    config = replace(SMALL, compress_block_size=1, compress_stride=1)
    x = make_inputs(40, config)
    out, _ = compressed_attention(x.q, x.k_cmp, x.v_cmp, config=config, impl=impl)
    torch.testing.assert_close(out, causal_attention(x.q, x.k_cmp, x.v_cmp))
