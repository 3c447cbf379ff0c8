"""What key_major adds up relative to a reference, where scores leave the reference far behind."""

from __future__ import annotations

import pytest
import torch

from flexnsa import selected_attention
from flexnsa.attention.sdpa.selected import HEADROOM
from tests.support.inputs import SMALL


@pytest.mark.parametrize("factor", [2, 50])
def test_scores_far_from_the_reference(factor: float) -> None:
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

    for got, exact in zip(run("sdpa"), run("reference"), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
