"""What mods are shown: token positions of visible pairs, in every branch and in scoring, and nothing to write to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NSAConfig, block_importance, mods
from tests.support.inputs import SMALL, TINY, attend_with_aux, make_inputs

DOCUMENTS = torch.repeat_interleave(torch.arange(6), torch.tensor([37, 1, 5, 70, 40, 7]))[None]


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_a_mod_meets_every_visible_pair_in_token_positions(impl: str) -> None:
    """Each branch shows one key only to the queries that may see it, whichever position is let through."""
    inputs, group = make_inputs(60), 2
    l, d, size, w = 8, 4, 16, 24  # noqa: E741  (the paper's name)
    everything = torch.arange(4, dtype=torch.int32).expand(1, 2, 60, -1)
    everything = torch.where(everything * size <= torch.arange(60)[:, None], everything, -1).contiguous()
    for position in (0, 7, 11, 33, 59):
        _, aux = attend_with_aux(
            inputs,
            impl=impl,
            block_indices=everything,
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx == position,  # noqa: B023, ARG005
        )
        t = torch.arange(60)
        v_slc, v_win = (x.repeat_interleave(group, 1)[:, :, position] for x in (inputs.v, inputs.v_win))
        seen = {"slc": (v_slc, t >= position), "win": (v_win, (t >= position) & (t < position + w))}
        if position >= l - 1 and (position - l + 1) % d == 0:
            v_cmp = inputs.v_cmp.repeat_interleave(group, 1)[:, :, (position - l + 1) // d]
            seen["cmp"] = (v_cmp, t >= position)
        else:
            seen["cmp"] = (v_slc, t < 0)
        for tag, (value, rows) in seen.items():
            expected = value[:, :, None] * rows[:, None]
            torch.testing.assert_close(getattr(aux, f"out_{tag}"), expected, msg=f"{tag} {position}")


def test_scoring_sees_the_mods() -> None:
    """Ban the compressed tokens that overlap a block, and the block scores 0; raise them, and it is chosen."""
    inputs = make_inputs(160)
    plain = block_importance(inputs.q, inputs.k_cmp, config=SMALL)
    banned = block_importance(inputs.q, inputs.k_cmp, config=SMALL, mask_mod=mods.banned_span(64, 87))
    assert (plain[:, :, 150, 4] > 0).all()
    assert (banned[:, :, 150, 4] == 0).all()

    def raised(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return torch.where((kv_idx >= 64) & (kv_idx < 80), score + 50, score)

    _, aux = attend_with_aux(inputs, impl="sdpa", score_mod=raised)
    assert aux.block_indices is not None
    assert (aux.block_indices[:, :, 90:] == 4).any(-1).all()


def test_a_score_mod_never_sees_the_future_nor_another_document() -> None:
    """So that a table of distances needs no guard, and a logarithm of one has a gradient."""
    rate = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def recency(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        return score - rate * torch.log1p(q_idx - kv_idx)

    for impl in ("reference", "sdpa"):
        rate.grad = None
        out, _ = attend_with_aux(
            make_inputs(DOCUMENTS.shape[1]).to(torch.float64), impl=impl, document_ids=DOCUMENTS, score_mod=recency
        )
        out.sum().backward()
        assert rate.grad is not None
        assert rate.grad.isfinite()
        assert rate.grad != 0


def test_banned_rows_and_tiny_documents_give_zeros_never_nan() -> None:
    """200 packs of documents mostly shorter than l, l' and d, with mods that ban whole rows of some."""
    config = replace(TINY, window_size=4)
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        lengths = torch.randint(1, 14, (4,), generator=generator)
        ids = torch.repeat_interleave(torch.arange(4), lengths)[None]
        position = torch.cat([torch.arange(int(length)) for length in lengths])
        inputs = make_inputs(ids.shape[1], config, kv_heads=1, key_dim=4, value_dim=4, seed=trial).to(torch.float32)
        stop = int(torch.randint(1, 12, (1,), generator=generator))
        options: dict[str, Any] = {"mask_mod": mods.banned_span(0, stop), "document_ids": ids, "config": config}
        if trial % 2:
            options["score_mod"] = mods.soft_cap(1.0)
        out, aux = attend_with_aux(inputs, impl="reference" if trial % 10 == 0 else "sdpa", **options)
        (out.sum() + aux.lse_cmp.exp().sum()).backward()
        assert out.isfinite().all()
        assert (out[:, :, position < stop] == 0).all()
        grads = {name: x.grad for name, x in inputs.named().items() if x.numel()}
        assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
        assert (grads["q"][:, :, position < stop] == 0).all()
        assert (grads["v"][:, :, position < stop] == 0).all()


TABLE = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
WITHOUT_SCORE: dict[str, Any] = {
    "distance": lambda score, b, h, q, k: (q - k) * -0.1,  # noqa: ARG005
    "query": lambda score, b, h, q, k: q * 0.1,  # noqa: ARG005
    "captured": lambda score, b, h, q, k: TABLE[q, k],  # noqa: ARG005
    "captured by head": lambda score, b, h, q, k: TABLE[h, 0],  # noqa: ARG005
    "one number": lambda score, b, h, q, k: TABLE[0, 0],  # noqa: ARG005
    "bf16": lambda score, b, h, q, k: TABLE[0, 0].bfloat16(),  # noqa: ARG005
    "fp64": lambda score, b, h, q, k: TABLE[q, k].double(),  # noqa: ARG005
}


@pytest.mark.parametrize("name", WITHOUT_SCORE)
def test_a_score_mod_may_ignore_the_score(name: str) -> None:
    x, before = make_inputs(60, dtype=torch.float32), TABLE.clone()
    got, want = (attend_with_aux(x, score_mod=WITHOUT_SCORE[name], impl=impl) for impl in ("sdpa", "reference"))
    for branch in ("out_cmp", "out_win"):  # equal scores are ties, whose blocks may differ by rounding
        torch.testing.assert_close(getattr(got[1], branch), getattr(want[1], branch))
    assert torch.equal(TABLE, before)


def test_what_a_score_mod_captured_is_only_read() -> None:
    one = NSAConfig(compress_block_size=1, compress_stride=1, select_block_size=1, num_selected_blocks=3, window_size=1)
    x = make_inputs(1, one, kv_heads=1, group=1, dtype=torch.float32)
    captured = torch.full((), 0.7)
    for impl in ("sdpa", "reference"):
        attend_with_aux(x, config=one, score_mod=lambda *_: captured, impl=impl)
        assert captured == torch.full((), 0.7)
