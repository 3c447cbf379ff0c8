"""The loss that teaches a scorer: against its definition in loops, value and gradient, and what it must not reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, block_shares, select_blocks, selection_loss, selection_recall
from flexnsa.attention.shares import CHUNK_SCORES
from flexnsa.config import num_compressed
from tests.support import literal
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL
from tests.support.scorers import BF16, FP32, FP64, INDEX, configs, learners, make, scores, tiny_configs, tiny_scores

impls = pytest.mark.parametrize("impl", ["sdpa", "reference"])
weights = pytest.mark.parametrize("query_weights", ["mass", "mean"])


def summed(x: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """The sum, its weight, and the gradients of the sum."""
    total, weight = selection_loss(**x, **{"num_queries": 10_000, **options}, reduction="sum")
    found = torch.autograd.grad(total, list(learners(x).values()))
    return {"total": total.detach(), "weight": weight, **dict(zip(learners(x), found, strict=True))}


def by_definition(x: dict[str, Any], query_weights: str, **options: Any) -> dict[str, Tensor]:
    scorer, scale = x.get("q_index", x["q"]), x["q"].shape[-1] ** -0.5
    found = literal.selection_divergence(
        x["q"], x["k"], scorer, x["k_cmp"], x["config"], scale=scale, score_scale=scale, **options
    )
    zero = torch.stack([value.sum() * 0 for value in learners(x).values()]).sum()
    kept = {"mass": [mass for _, mass in found.values()], "mean": [torch.ones(())] * len(found)}[query_weights]
    total = sum((kl * weight for (kl, _), weight in zip(found.values(), kept, strict=True)), zero)
    grads = torch.autograd.grad(total, list(learners(x).values()))
    weight = sum(kept, torch.zeros(()))
    return {"total": total.detach(), "weight": weight, **dict(zip(learners(x), grads, strict=True))}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name].double(), value.double(), atol=1e-12, rtol=1e-10, msg=name)


@weights
@tiny_scores
@pytest.mark.parametrize("seq_len", [1, 3, 4, 8, 13, 43])
def test_value_and_gradient_are_those_of_the_definition(seq_len: int, config: NSAConfig, query_weights: str) -> None:
    x = make(seq_len, config, batch=1, kv_heads=1 + config.ahead)  # two that choose together
    want = by_definition(x, query_weights)
    for impl in ("sdpa", "reference"):
        assert_equal(summed(x, query_weights=query_weights, impl=impl), want)
    assert bool(want["total"] > 0) == (seq_len == 43 or (seq_len == 13 and config.num_local_blocks == 0))


def biased(score: Tensor, h: Any, t: Any, s: Any) -> Tensor:
    return score - (t - s) * 0.0625 * (h + 1)  # exact in fp32, which products of integers are computed in


def far(t: Any, s: Any) -> Any:
    return (t - s) % 11 != 0


def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return biased(score, h, q_idx, kv_idx)


def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return far(q_idx, kv_idx)


@tiny_configs
def test_a_block_whose_tokens_are_banned_keeps_its_place_among_the_scores(config: NSAConfig) -> None:
    """Keys that are longer than a block are seen by their last token, which another block holds."""
    x = make(43, config, batch=1, kv_heads=1)
    want = by_definition(x, "mass", score_mod=without_block_1)
    for impl in ("sdpa", "reference"):
        assert_equal(summed(x, mask_mod=not_block_1, impl=impl), want)


def without_block_1(score: Tensor, _h: int, _t: int, s: int) -> Tensor:
    return score.new_tensor(-torch.inf) if 8 <= s < 16 else score


def not_block_1(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return (kv_idx < 8) | (kv_idx >= 16) | (q_idx < 0)


def first_half(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return (kv_idx < 8) & (q_idx >= 0)


@tiny_configs
def test_mods_count_on_both_sides(config: NSAConfig) -> None:
    def mod(score: Tensor, h: int, t: int, s: int) -> Tensor:
        return biased(score, h, t, s) if far(t, s) else score.new_tensor(-torch.inf)

    x = make(43, config, batch=1)
    want = by_definition(x, "mass", score_mod=mod)
    assert want["total"] > 0
    for impl in ("sdpa", "reference"):
        assert_equal(summed(x, score_mod=score_mod, mask_mod=mask_mod, impl=impl), want)


@impls
@configs
def test_queries_whose_blocks_are_all_banned_count_nothing(config: NSAConfig, impl: str) -> None:
    x = make(83, replace(config, num_init_blocks=1), batch=1)
    got = summed(x, mask_mod=first_half, impl=impl)  # block 0 is forced, and holds all that is left
    assert all(bool((value == 0).all()) for value in got.values())
    assert selection_loss(**x, mask_mod=first_half, impl=impl) == 0


@impls
@weights
@scores
def test_packed_documents_count_as_if_alone(config: NSAConfig, query_weights: str, impl: str) -> None:
    """Shorter than a compressed token, than a block, and of several blocks; their keys lie one after the other."""
    documents = (70, 3, 83, 14, 47)
    x = make(sum(documents), config, documents=documents)
    got = summed(x, query_weights=query_weights, impl=impl)
    counts = [num_compressed(length, config.scoring) for length in documents]
    keys = x["k_cmp"][:, :, : sum(counts)].split(counts, 2)
    parts = zip(*(value.split(documents, 2) for value in (x["q"], x["k"])), keys, strict=True)
    queries = x["q_index"].split(documents, 2) if "q_index" in x else [None] * len(documents)
    sums = [
        selection_loss(
            q, k, k_cmp, q_index=q_index, config=config, reduction="sum", query_weights=query_weights, impl=impl
        )
        for (q, k, k_cmp), q_index in zip(parts, queries, strict=True)
    ]
    total, weight = (torch.stack(values).sum() for values in zip(*sums, strict=True))
    assert total > 0
    grads = dict(zip(learners(x), torch.autograd.grad(total, list(learners(x).values())), strict=True))
    assert_equal(got, {"total": total.detach(), "weight": weight, **grads})


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("group", [1, 2, 4, 6, 8, 16, 32])
@pytest.mark.parametrize("seq_len", [129, 300])
def test_as_exact_as_the_plain_formula(seq_len: int, group: int, dtype: torch.dtype) -> None:
    config = replace(INDEX, index_heads=2 if group % 2 == 0 else 1)
    rounded = make(seq_len, config, batch=1, kv_heads=1 if group > 4 else 2, group=group, dim=16, dtype=dtype)
    exact = {name: x.detach().to(FP64) if isinstance(x, Tensor) else x for name, x in rounded.items()}
    for name in learners(exact):
        exact[name].requires_grad_()
    got, plain = (summed(rounded, impl=impl) for impl in ("sdpa", "reference"))
    want = summed(exact, impl="reference")
    for names, factor in ((("total", "weight"), 2), (("k_cmp", "q_index"), 3)):
        chosen = ({name: x[name] for name in names} for x in (got, plain, want))
        assert_as_exact_as_plain(*chosen, factor=factor)


@scores
def test_chunks_of_queries_change_nothing(config: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(100, config, documents=(61, 39))
    want = summed(x), block_shares(x["q"], x["k"], config=config)
    monkeypatch.setitem(CHUNK_SCORES, "cpu", 4000)
    got = summed(x), block_shares(x["q"], x["k"], config=config)
    assert_equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_the_gradient_reaches_the_scorer_alone() -> None:
    x = make(100, INDEX)
    x["q"].requires_grad_()
    x["k"].requires_grad_()
    selection_loss(**x).backward()
    assert x["q"].grad is x["k"].grad is None
    assert all(value.grad.abs().sum() > 0 for value in learners(x).values())
    y = make(100, SMALL)
    y["q"].requires_grad_()
    selection_loss(**y).backward()
    assert y["q"].grad is None
    assert y["k_cmp"].grad.abs().sum() > 0


@pytest.mark.parametrize("config", [SMALL, INDEX], ids=["compressed keys", "index heads"])
def test_where_every_block_is_forced_the_loss_is_0(config: NSAConfig) -> None:
    for changed in (replace(config, num_local_blocks=3), replace(config, num_init_blocks=4, num_local_blocks=0)):
        x = make(48, replace(changed, num_selected_blocks=4))
        loss = selection_loss(**x)
        assert float(loss) == 0
        grads = torch.autograd.grad(loss, list(learners(x).values()))
        assert all(bool((grad == 0).all()) for grad in grads)


def test_a_future_token_changes_no_sampled_query_before_it() -> None:
    x = make(100, INDEX)
    changed = x | {name: x[name].detach().clone() for name in ("q", "k", "q_index", "k_cmp")}
    for name in ("q", "k", "q_index"):
        changed[name][:, :, 80:] = torch.randn(1)
    changed["k_cmp"][:, :, 20:] = torch.randn(1)
    past = torch.arange(100).expand(2, -1) < 80

    def of_past(x: dict[str, Any]) -> Tensor:
        parts = {name: x[name][:, :, : 20 if name == "k_cmp" else 80] for name in ("q", "k", "q_index", "k_cmp")}
        return selection_loss(**x | parts, num_queries=int(past[0].sum()))

    assert of_past(x) == of_past(changed)
    assert selection_loss(**x, num_queries=100) != selection_loss(**changed, num_queries=100)


def test_a_scorer_taught_by_the_loss_chooses_better_blocks() -> None:
    x = make(300, INDEX, batch=1, group=4)
    optimizer = torch.optim.Adam(learners(x).values(), lr=0.1)

    def recall() -> Tensor:
        blocks = select_blocks(x["q"], None, q_index=x["q_index"], k_index=x["k_cmp"], config=INDEX)
        return selection_recall(x["q"], x["k"], blocks, config=INDEX)

    before = recall()
    for step in range(60):
        optimizer.zero_grad()
        selection_loss(**x, num_queries=100, step=step).backward()
        optimizer.step()
    assert (recall() > before + 0.1).all()


@pytest.mark.parametrize("config", [SMALL, INDEX], ids=["compressed keys", "index heads"])
def test_parts_of_a_batch_add_up_to_the_whole(config: NSAConfig) -> None:
    x = make(200, config, batch=3)
    options: dict[str, Any] = {"num_queries": 20, "seed": 3, "step": 9}
    want = summed(x, **options)
    parts: list[dict[str, Tensor]] = []
    for row in (1, 0, 2):
        part = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in x.items()}
        total, weight = selection_loss(**part, **options, sequence_ids=torch.tensor([row]), reduction="sum")
        parts.append({"total": total.detach(), "weight": weight})
    assert_equal(
        {name: sum((p[name] for p in parts), torch.zeros(())) for name in ("total", "weight")},
        {name: want[name] for name in ("total", "weight")},
    )
    assert_equal({"mean": selection_loss(**x, **options)}, {"mean": want["total"] / want["weight"]})


def test_compiles_whole_once_for_all_steps() -> None:
    x, compilations = make(100, INDEX, dtype=FP32), list[Any]()

    def backend(module: Any, inputs: Any) -> Any:  # noqa: ARG001
        compilations.append(module)
        return module

    compiled = torch.compile(selection_loss, fullgraph=True, backend=backend)
    for step in range(3):
        got = compiled(**x, num_queries=10, step=torch.tensor(step))
        torch.testing.assert_close(got, selection_loss(**x, num_queries=10, step=step))
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        ("selection_loss", {"q_index": None}, "q_index: expected a tensor"),
        ("selection_loss", {"config": SMALL}, "q_index: expected None without config.index_heads"),
        ("selection_loss", {"k_cmp": torch.ones(2, 2, 3, 8)}, r"k_cmp: expected shape \(2, 2, 15, 8\)"),
        ("selection_loss", {"query_weights": "max"}, "query_weights: expected one of 'mass', 'mean', got 'max'"),
        ("selection_loss", {"reduction": "none"}, "reduction: expected one of 'mean', 'sum', got 'none'"),
        ("selection_loss", {"num_queries": 0}, "num_queries: expected at least 1, got 0"),
        ("selection_loss", {"seed": 0.5}, "seed: expected an int, got 0.5"),
        ("selection_loss", {"step": 2**63}, "step: expected at most 9223372036854775807"),
        ("selection_loss", {"sequence_ids": torch.arange(3)}, r"sequence_ids: expected shape \(2,\)"),
        ("block_shares", {"k": torch.ones(2, 3, 60, 8)}, "k: expected a number of heads that divides the 4 of q"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(function: str, changes: dict[str, Any], message: str) -> None:
    x = make(60, INDEX, dtype=FP32)
    chosen = x if function == "selection_loss" else {name: x[name] for name in ("q", "k", "config")}
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        getattr(flexnsa, function)(**chosen | changes)
