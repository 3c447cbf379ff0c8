"""Sequences whose branches see the whole past, and those one token or one block longer, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexnsa import native_sparse_attention, select_blocks, selected_attention, sliding_window_attention
from flexnsa.attention.sdpa import interval
from flexnsa.attention.sdpa.chunks import IntervalInputs
from flexnsa.attention.sdpa.interval import attend_to_intervals, differentiate_intervals
from flexnsa.attention.sdpa.products import attend_by_products, differentiate_by_products
from tests.attention.test_parity import check
from tests.support.inputs import SMALL, Inputs, make_inputs

WINDOW = SMALL.window_size
BLOCKS = SMALL.num_selected_blocks * SMALL.select_block_size
BORDERS = (WINDOW, WINDOW + 1, BLOCKS, BLOCKS + 1, 2 * BLOCKS + 3)
lengths = pytest.mark.parametrize("length", BORDERS)
calls = pytest.mark.parametrize("short", [0, BORDERS[-1]], ids=["chunks", "one call"])
"""Whether queries that see the whole past are in chunks, or a call of their own."""


@calls
@lengths
@pytest.mark.parametrize("group", [1, 2, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_and_gradients(
    length: int, group: int, dtype: torch.dtype, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "SHORT", short)
    check(make_inputs(length, group=group, batch=2, value_dim=24, dtype=torch.float32), SMALL, dtype, "auto")


@calls
@lengths
@pytest.mark.parametrize("branch", ["slc", "win"])
def test_gradients_of_lse(length: int, branch: str, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "SHORT", short)
    x = make_inputs(length).to(torch.float64)
    blocks = select_blocks(x.q, x.k_cmp, config=SMALL)

    def run(impl: str) -> list[Tensor]:
        if branch == "slc":
            out, lse = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
        else:
            out, lse = sliding_window_attention(x.q, x.k, x.v, config=SMALL, impl=impl)
        assert lse is not None
        both = torch.autograd.grad(out.square().sum() + lse.sin().sum(), (x.q, x.k, x.v), retain_graph=True)
        return [out, lse, *both, *torch.autograd.grad(lse.sin().sum(), (x.q, x.k))]

    torch.testing.assert_close(run("sdpa"), run("reference"))


@pytest.mark.parametrize("length", [WINDOW, BLOCKS + 1])
def test_it_compiles_to_one_graph(length: int) -> None:
    x = make_inputs(length, dtype=torch.float32).to(torch.float32)

    def attention(*tensors: Tensor) -> Tensor:
        return native_sparse_attention(**Inputs(*tensors).named(), config=SMALL)

    tensors = tuple(x.named().values())
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    got, expected = (
        [out, *torch.autograd.grad(out.square().sum(), tensors)]
        for out in (run(*tensors) for run in (compiled, attention))
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("age", [31, 70])
@pytest.mark.usefixtures("threads")
def test_products_and_the_fused_kernel_agree(number: int, negative: bool, age: int) -> None:
    """Devices without the kernel take separate products; gaps, rows without keys and one key head for many threads."""
    x = make_inputs(70, kv_heads=1, group=6, value_dim=24, batch=2)
    token = torch.arange(70)[None].int()
    lo, hi = (token - age).clamp_min(0), (token - 5).clamp_min(0)
    inputs = IntervalInputs(x.q, x.k, x.v, lo, hi, -0.3 if negative else 0.25, 16)
    torch.set_num_threads(number)
    fused, plain = attend_to_intervals(inputs), attend_by_products(inputs)
    torch.testing.assert_close(fused, plain)
    for grad_lse in (None, torch.randn_like(plain[1])):
        upstream = (torch.randn_like(plain[0]), grad_lse)
        got, expected = (
            function(*upstream, inputs, *plain) for function in (differentiate_intervals, differentiate_by_products)
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [40, 400])
def test_gradients_through_the_log_sum_exp_are_laid_out_as_compiled_code_expects(length: int) -> None:
    q, k, v = torch.randn(1, 4, length, 16), torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16)
    lo, hi = torch.zeros(1, length, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32)[None]
    inputs = IntervalInputs(q, k, v, lo, hi, 0.25, 64)
    out, lse = attend_to_intervals(inputs)
    grads = differentiate_intervals(torch.ones_like(out), torch.ones_like(lse), inputs, out, lse)
    assert [x.stride() for x in grads] == [x.stride() for x in (q, k, v)]
