"""A query without a key: output 0, lse ``-inf``, gradients 0, never NaN; nor do large scores overflow."""

from __future__ import annotations

import pytest
import torch

from flexnsa import ScoreMod, compressed_attention, select_blocks, selected_attention, sliding_window_attention
from flexnsa.attention.sdpa.selected import HEADROOM
from flexnsa.mods import soft_cap
from tests.support.inputs import SMALL, attend, make_inputs

impls = pytest.mark.parametrize("impl", ["reference", "sdpa"])


@impls
@pytest.mark.parametrize("seq_len", [1, 7, 8, 30])
def test_before_the_first_compressed_token(impl: str, seq_len: int) -> None:
    x = make_inputs(seq_len).to(torch.float64)
    out, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, config=SMALL, impl=impl)
    empty = slice(0, min(7, seq_len))
    assert (out[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -torch.inf).all()
    assert lse[:, :, 7:].isfinite().all()
    loss = out.sum() + lse.where(lse.isfinite(), 0.0).sum()
    grads = torch.autograd.grad(loss, (x.q, x.k_cmp, x.v_cmp))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, empty] == 0).all()


@impls
def test_where_no_block_is_selected(impl: str) -> None:
    x = make_inputs(40).to(torch.float64)
    blocks = select_blocks(x.q, x.k_cmp, config=SMALL, impl=impl)
    blocks[:, 1, ::2] = -1
    out, lse = selected_attention(x.q, x.k, x.v, blocks, config=SMALL, impl=impl)
    assert (out[:, 2:, ::2] == 0).all()
    assert (lse[:, 2:, ::2] == -torch.inf).all()
    assert lse[:, 2:, 1::2].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse.where(lse.isfinite(), 0.0).sum(), (x.q, x.k, x.v))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, 2:, ::2] == 0).all()
    assert (grads[0][:, 2:, 1::2] != 0).any()


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(impl: str, dtype: torch.dtype) -> None:
    x = make_inputs(77, dtype=dtype)
    x = x.replace(q=x.q * 100, k=x.k * 100, k_cmp=x.k_cmp * 100, k_win=x.k_win * 100).to(dtype)
    out = attend(x, impl=impl)
    grads = torch.autograd.grad(out.float().square().sum(), list(x.named().values()))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@impls
@pytest.mark.parametrize("mod", [None, soft_cap(30.0)])
def test_a_nan_key_reaches_the_queries_that_see_it(impl: str, mod: ScoreMod | None) -> None:
    x = make_inputs(40)
    blocks = torch.zeros(1, 2, 40, 4, dtype=torch.int32).sub_(torch.tensor([0, 1, 1, 1], dtype=torch.int32))
    for key in (x.k, x.k_cmp):
        key.data[:, :, 5] = torch.nan
    options = {"config": SMALL, "impl": impl, "score_mod": mod}
    for first, last, (out, lse) in (
        (5, 40, selected_attention(x.q, x.k, x.v, blocks, **options)),
        (5, 5 + SMALL.window_size, sliding_window_attention(x.q, x.k, x.v, **options)),
        (5 * SMALL.compress_stride + 7, 40, compressed_attention(x.q, x.k_cmp, x.v_cmp, **options)),
    ):
        for found in (out[..., 0], lse):
            assert found[:, :, first:last].isnan().all()
            assert not found[:, :, :first].isnan().any()
            assert not found[:, :, last:].isnan().any()


@pytest.mark.parametrize("factor", [2, 50])
def test_key_major_adds_up_scores_far_from_its_reference(factor: float) -> None:
    """The reference is a score with the first key; those of later blocks are far above it, then far below."""
    length, blocks = 64, 4
    q = torch.ones(1, 2, length, 8, dtype=torch.float64)
    k = torch.randn(1, 1, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = torch.randn(1, 1, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    k += HEADROOM * factor * torch.tensor([-1.0, 1.0, 3.0, -3.0], dtype=k.dtype).repeat_interleave(16)[:, None]
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    chosen = torch.arange(blocks, dtype=torch.int32).expand(1, 1, length, blocks)
    past = torch.arange(length, dtype=torch.int32)[:, None] // SMALL.select_block_size
    chosen = torch.where(chosen <= past, chosen, -1)

    def run(impl: str) -> list[torch.Tensor]:
        out, lse = selected_attention(*inputs, chosen, config=SMALL, impl=impl)
        assert lse is not None
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)]

    torch.testing.assert_close(run("sdpa"), run("reference"), rtol=1e-9, atol=1e-9)
