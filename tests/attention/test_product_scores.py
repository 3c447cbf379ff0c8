"""Blocks chosen by products of their keys: against a loop over queries and blocks, where these are of either sign."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig, block_importance, native_sparse_attention, select_blocks
from flexnsa.attention.selection import top_blocks
from flexnsa.attention.shares import CHUNK_SCORES
from flexnsa.attention.triton.selected import in_halves
from flexnsa.config import num_compressed
from flexnsa.masks.positions import Positions
from tests.support import literal
from tests.support.scorers import BEST_KEYS, FP32, UNITS, make

SIZE = BEST_KEYS.select_block_size
SELECTED: dict[str, Any] = {"k_cmp": None, "v_cmp": None, "branches": ("slc",)}


def looped(q: Tensor, k: Tensor, config: NSAConfig) -> Tensor:
    """The scores of blocks in a loop, ``-inf`` for blocks ahead and for units that are not complete."""
    products = q @ k.mT if config == BEST_KEYS else (q @ k.mT).relu().sum(1, keepdim=True)
    scores = torch.full((*products.shape[:3], -(-q.shape[2] // SIZE)), -torch.inf)
    for t in range(q.shape[2]):
        for j in range(t // SIZE + 1):
            if config == BEST_KEYS:
                scores[:, :, t, j] = products[:, :, t, j * SIZE : min(t + 1, (j + 1) * SIZE)].amax(-1)
            elif (j + 1) * SIZE <= t + 1:
                scores[:, :, t, j] = products[:, :, t, j]
    return scores


def inputs(length: int, sign: int = 0, config: NSAConfig = BEST_KEYS) -> tuple[Tensor, dict[str, Any]]:
    """Whole numbers, whose products are exact and often equal; all of one sign, or of either (0)."""
    x = make(length, config, batch=1, dtype=FP32)
    q, k = (x[name].detach().mul(2).round() for name in ("q_index", "k_cmp"))
    return x["q"], {"q_index": q.abs() * sign if sign else q, "k_index": k.abs() if sign else k}


@pytest.mark.parametrize("kind", [BEST_KEYS, UNITS], ids=["best keys", "units"])
@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("sign", [0, 1, -1])
@pytest.mark.parametrize("lengths", [(5,), (16,), (63,), (64,), (65,), (200,), (90, 3, 107)], ids=str)
def test_choice_is_that_of_a_loop(
    lengths: tuple[int, ...], sign: int, impl: str, kind: NSAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK_SCORES, "cpu", 7_000 if kind == BEST_KEYS else 700)  # several chunks
    q, index = inputs(sum(lengths), sign, kind)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None] if len(lengths) > 1 else None
    counts = [num_compressed(length, kind.scoring) for length in lengths]
    keys = index["k_index"][:, :, : sum(counts)].split(counts, 2)
    scores = [looped(*parts, kind) for parts in zip(index["q_index"].split(lengths, 2), keys, strict=True)]
    if ids is None:
        assert torch.equal(block_importance(q, None, config=kind, **index), scores[0])
    k, gates = torch.randn(1, 2, q.shape[2], 8), torch.ones(*q.shape[:3], 3)
    for init, local in ((0, 1), (1, 2), (0, 0)) if kind == BEST_KEYS else ((0, 1),):
        config = replace(kind, num_init_blocks=init, num_local_blocks=local)
        options: dict[str, Any] = {"config": config, "document_ids": ids, "impl": impl} | index
        want = torch.cat([literal.select_blocks(each, config) for each in scores], 2).expand(-1, 2, -1, -1)
        assert torch.equal(select_blocks(q, None, **options), want)
        _, aux = native_sparse_attention(q, k, k, gates, **SELECTED, **options, return_aux=True)
        torch.testing.assert_close(aux.block_indices, want, rtol=0, atol=0)


def test_minus_zero_is_zero() -> None:
    scores, last = torch.tensor([-0.0, 0.0, -1e-45, 0.0, -0.0, 9.0]), Positions.of_queries(torch.tensor([5 * SIZE]))
    config = replace(BEST_KEYS, num_selected_blocks=3)
    assert top_blocks(scores.expand(1, 1, 1, 6), last, config=config).tolist() == [[[[0, 1, 5]]]]


def test_halves_of_blocks_are_attended_to_as_blocks() -> None:
    q, index = inputs(200)
    blocks, k = select_blocks(q, None, config=BEST_KEYS, **index), torch.randn(1, 2, 200, 8)
    sizes = dict.fromkeys(("compress_block_size", "compress_stride", "select_block_size"), SIZE // 2)
    halves = replace(BEST_KEYS, **sizes, num_selected_blocks=2 * BEST_KEYS.num_selected_blocks), in_halves(blocks, 25)
    out, other = (
        native_sparse_attention(q, k, k, torch.ones(1, 4, 200, 3), **SELECTED, config=config, block_indices=chosen)
        for config, chosen in ((BEST_KEYS, blocks), halves)
    )
    torch.testing.assert_close(out, other)


def test_what_does_not_fit_is_named() -> None:
    q, index = inputs(40)
    keys = index["k_index"].expand(-1, 2, -1, -1)
    with pytest.raises(ValueError, match=r"^k_index: expected shape \(1, 1, 40, 8\)"):
        select_blocks(q, None, config=BEST_KEYS, q_index=index["q_index"], k_index=keys)
    without: dict[str, Any] = dict.fromkeys(("index_heads", "index_block_size", "index_stride"))
    refused: dict[str, dict[str, Any]] = {
        "index_score: expected one of 'max', 'relu', got 'mass'": {"index_score": "mass"},
        r"num_init_blocks, num_local_blocks: expected 16, 16, 0, 1 .* got \(1, 1, 0, 1\)": {"index_score": "relu"},
        "index_score: expected None without index_heads, got 'max'": without,
        "index_head_dim: expected an even number with an index_score, None without, got 7": {"index_head_dim": 7},
        "index_head_dim: expected .*, got 8": {"index_head_dim": 8, "index_score": None},
        r"index_stride, index_heads: expected 1, 1, 1 .* got \(2, 2, 1\)": {"index_block_size": 2, "index_stride": 2},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            replace(BEST_KEYS, **changes)
    wrong: dict[str, Any] = {"index_score": "mass"}
    for preset in (NSAConfig.msa, NSAConfig.qsa):
        with pytest.raises(ValueError, match="index_score: expected one of 'max', 'relu', got 'mass'"):
            preset(**wrong)
