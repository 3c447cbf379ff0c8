"""Index heads in place of the compressed branch, the true shares of blocks, and what a choice finds of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, block_shares, select_blocks, selection_recall
from flexnsa.config import num_compressed
from tests.support.inputs import SMALL
from tests.support.scorers import FP32, FP64, INDEX, TWO_HEADS, configs, make


@configs
def test_shares_are_softmax_mass_by_block(config: NSAConfig) -> None:
    x = make(59, config, batch=1)
    shares = block_shares(x["q"], x["k"], config=config)
    scores = (x["q"] @ x["k"].repeat_interleave(2, 1).mT) * 8**-0.5
    probs = scores.masked_fill(~torch.ones(59, 59).tril().bool(), -torch.inf).softmax(-1)
    want = torch.nn.functional.pad(probs, (0, 5)).unflatten(-1, (4, 16)).sum(-1).unflatten(1, (2, 2)).mean(2)
    torch.testing.assert_close(shares, want)


def test_shares_of_packed_documents_are_those_of_each_alone() -> None:
    documents = (50, 3, 59)
    x = make(sum(documents), SMALL, documents=documents)
    shares = block_shares(x["q"], x["k"], config=SMALL, document_ids=x["document_ids"]).split(documents, 2)
    for got, q, k in zip(shares, *(x[name].split(documents, 2) for name in "qk"), strict=True):
        alone = block_shares(q, k, config=SMALL)
        torch.testing.assert_close(got[..., : alone.shape[-1]], alone)
        assert (got[..., alone.shape[-1] :] == 0).all()


def test_shares_of_a_query_that_sees_no_key_are_0() -> None:
    x = make(59, SMALL, batch=1)
    shares = block_shares(x["q"], x["k"], config=SMALL, mask_mod=lambda _b, _h, q_idx, _kv_idx: q_idx != 40)
    assert (shares[:, :, 40] == 0).all()
    want = block_shares(x["q"], x["k"], config=SMALL)
    others = torch.arange(59) != 40
    torch.testing.assert_close(shares[:, :, others], want[:, :, others])


@pytest.mark.parametrize("forced", [False, True])
def test_recall_is_1_for_the_best_blocks_and_the_share_found_for_others(forced: bool) -> None:
    x = make(200, SMALL, batch=2)
    shares = block_shares(x["q"], x["k"], config=SMALL)
    free = shares.clone()
    free[..., 0] = 0  # one first block and two local ones are forced
    for t in range(200):
        free[:, :, t, max(0, t // 16 - 1) :] = 0
    best = free.topk(1).indices  # the fourth of n
    counted = shares if forced else free

    def choice(fourth: Tensor) -> Tensor:
        rows = torch.full((2, 2, 200, 4), -1, dtype=torch.int32)
        for t in range(200):
            own = [j for j in {0, t // 16 - 1, t // 16} if j >= 0]
            for b in range(2):
                for h in range(2):
                    chosen = sorted({*own, *([int(fourth[b, h, t])] if t >= 48 else [])})
                    rows[b, h, t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        return rows

    def found(rows: Tensor) -> Tensor:
        return counted.gather(-1, rows.clamp_min(0).long()).masked_fill(rows < 0, 0).sum((0, 2, 3))

    one = torch.ones(2, 2, 200, dtype=torch.int64)
    recalls = [selection_recall(x["q"], x["k"], choice(c), config=SMALL, forced=forced) for c in (best[..., 0], one)]
    torch.testing.assert_close(recalls[0], torch.ones(2))
    torch.testing.assert_close(recalls[1].double(), found(choice(one)) / found(choice(best[..., 0])))
    assert (recalls[1] < 0.99).all()


IMPLS = ["sdpa", "reference"]


@pytest.mark.parametrize("documents", [(), (61, 5, 134)], ids=["one sequence", "documents"])
@pytest.mark.parametrize("config", [INDEX, TWO_HEADS], ids=["one index head", "two index heads"])
def test_attention_selects_by_index_heads(config: NSAConfig, documents: tuple[int, ...]) -> None:
    x = make(200, config, documents=documents)
    k_cmp, gates = torch.randn(2, 2, num_compressed(200, config), 8, dtype=FP64), torch.rand(2, 4, 200, 3)
    index = {"q_index": x["q_index"].detach(), "k_index": x["k_cmp"].detach(), "index_scale": 0.7}
    ids = {"document_ids": x["document_ids"]} if documents else {}
    blocks = [select_blocks(x["q"], None, config=config, **index, **ids, impl=impl) for impl in IMPLS]
    assert torch.equal(*blocks)
    values = x["k"], gates.double()
    options: dict[str, Any] = {"k_cmp": k_cmp, "v_cmp": k_cmp, "config": config, "return_aux": True} | ids
    for impl in IMPLS:
        out, aux = flexnsa.native_sparse_attention(x["q"], x["k"], *values, **options, **index, impl=impl)
        assert torch.equal(aux.block_indices, blocks[0])
        given = flexnsa.native_sparse_attention(x["q"], x["k"], *values, **options, block_indices=blocks[0], impl=impl)
        assert torch.equal(out, given[0])
    by_keys = replace(config.scoring, compress_block_size=config.compress_block_size, compress_stride=4)
    assert not torch.equal(blocks[0], select_blocks(x["q"], k_cmp, config=by_keys, **ids))


def test_importance_by_index_heads_is_that_of_compressed_keys_of_their_sizes() -> None:
    x = make(120, TWO_HEADS)
    index = {"q_index": x["q_index"].detach(), "k_index": x["k_cmp"].detach()}
    got = flexnsa.block_importance(x["q"], None, config=TWO_HEADS, **index)
    want = flexnsa.block_importance(x["q_index"].detach(), x["k_cmp"].detach(), config=TWO_HEADS.scoring)
    assert torch.equal(got, want)


def test_queries_at_some_positions_select_what_they_select_among_all() -> None:
    x, at = make(200, INDEX), torch.tensor([3, 50, 51, 120, 199])
    k_cmp = torch.randn(2, 2, num_compressed(200, INDEX), 8, dtype=FP64)
    gates = torch.rand(2, 4, 200, 3, dtype=FP64)
    options: dict[str, Any] = {"k_cmp": k_cmp, "v_cmp": k_cmp, "config": INDEX, "k_index": x["k_cmp"].detach()}
    for ids in (None, torch.arange(200).expand(2, -1) // 67):
        options["document_ids"] = ids
        q_index = x["q_index"].detach()
        whole = flexnsa.native_sparse_attention(x["q"], x["k"], x["k"], gates, q_index=q_index, **options)
        some = flexnsa.native_sparse_attention(
            x["q"][:, :, at], x["k"], x["k"], gates[:, :, at], q_index=q_index[:, :, at], positions=at, **options
        )
        torch.testing.assert_close(some, whole[:, :, at])


@pytest.mark.parametrize("function", ["select_blocks", "block_importance"])
def test_wrong_scorers_are_named(function: str) -> None:
    x = make(60, INDEX, dtype=FP32)
    index = {"q_index": x["q_index"].detach(), "k_index": x["k_cmp"].detach()}
    run = getattr(flexnsa, function)
    with pytest.raises(TypeError, match=r"^q_index: expected"):
        run(x["q"], None, config=INDEX)
    with pytest.raises(ValueError, match=r"^k_index: expected heads that divide the 4 of q, and index_heads=2 queries"):
        run(x["q"], None, config=replace(INDEX, index_heads=2), **index)
    with pytest.raises(ValueError, match=r"^index_scale: expected None without config.index_heads, got 2"):
        run(x["q"], x["k_cmp"], config=SMALL, index_scale=2.0)
    with pytest.raises(TypeError, match=r"^k_cmp: expected"):
        run(x["q"], None, config=SMALL)
