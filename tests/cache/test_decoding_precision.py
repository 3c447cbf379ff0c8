"""Which blocks a step selects in low precision: those of a whole pass, but for what rounding may change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from flexnsa.functional import block_importance
from tests.support.inputs import SMALL
from tests.support.operators import Operators

SEQ_LEN, PREFILL = 160, 140


@torch.no_grad()
def selections(dtype: torch.dtype, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of a whole pass and of steps: q and k_cmp as they were scored, and the blocks of the last queries."""
    torch.manual_seed(seed)
    layer = NativeSparseAttention(64, 4, 2, 16, config=SMALL, impl="sdpa").to(dtype)
    x = torch.randn(2, SEQ_LEN, 64).to(dtype)
    with Operators() as whole:
        layer(x)
    cache = layer.new_cache(2, SEQ_LEN)
    layer(x[:, :PREFILL], cache=cache)
    with Operators() as steps:
        for t in range(PREFILL, SEQ_LEN):
            layer(x[:, t : t + 1], cache=cache)
    q, k_cmp = whole.calls["select_in_chunks"][0][:2]
    chosen = whole.calls["selected_attention"][0][3]
    scored = steps.calls["attend_and_score"]
    q_steps = torch.cat([args[0] for args in scored], 2)
    chosen_steps = torch.cat([args[3] for args in steps.calls["attend_to_blocks"]], 2)
    return (
        [q[:, :, PREFILL:], k_cmp, chosen[:, :, PREFILL:]],
        [q_steps, scored[-1][1][:, :, : k_cmp.shape[2]], chosen_steps],
    )


def worth(q: Tensor, k_cmp: Tensor, chosen: Tensor) -> Tensor:
    """Importance of the chosen blocks together, by row."""
    importance = block_importance(q.double(), k_cmp.double(), config=SMALL, seq_len=SEQ_LEN).double()
    return importance.gather(-1, chosen.long().clamp_min(0)).mul(chosen >= 0).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_select_blocks_of_equal_score_but_for_rounding(dtype: torch.dtype) -> None:
    """The blocks of a step are worth at least ``exp(-4 e)`` of the best where scores differ by at most ``e``.

    Probabilities then differ by a factor of at most ``exp(2 e)``, once for the best blocks and once for the chosen.
    """
    other = 0
    for seed in range(4):
        (q, k, chosen), (q_steps, k_steps, chosen_steps) = selections(dtype, seed)
        group = q.shape[1] // k.shape[1]
        scores, scores_steps = (
            q.double() @ k.double().repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
            for q, k in ((q, k), (q_steps, k_steps))
        )
        error = (scores - scores_steps).abs().amax(-1).unflatten(1, (-1, group)).amax(2) + 1e-6
        assert error.max() < 8 * torch.finfo(dtype).eps * scores.abs().max() + 2e-6  # nothing but roundings
        loss = 1 - worth(q, k, chosen_steps) / worth(q, k, chosen)
        assert (loss <= 1 - (-4 * error).exp()).all()
        other += int((chosen != chosen_steps).any(-1).sum())
    assert other < 20  # of 320 rows
