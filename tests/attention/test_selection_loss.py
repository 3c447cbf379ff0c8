"""The loss that teaches a scorer: against its definition in loops, value and gradient, and what it must not reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, block_shares, select_blocks, selection_loss, selection_recall
from flexnsa.attention.selection_loss import sampled_tokens
from flexnsa.geometry import num_compressed
from tests.support import literal
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.inputs import SMALL, TINY

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
INDEX = replace(SMALL, index_block_size=4, index_stride=4, index_heads=1)
TWO_HEADS = replace(SMALL, index_block_size=8, index_stride=4, index_heads=2)
NOT_FORCED = replace(INDEX, num_init_blocks=0, num_local_blocks=0)
LONG_KEYS = replace(SMALL, compress_block_size=32)
CONFIGS = {
    "compressed keys": SMALL,
    "keys longer than blocks": LONG_KEYS,
    "one index head": INDEX,
    "two index heads, keys that overlap": TWO_HEADS,
    "nothing forced": NOT_FORCED,
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
TINY_CONFIGS = {
    "compressed keys": replace(TINY, num_selected_blocks=4),
    "keys longer than blocks": replace(TINY, compress_block_size=16, num_selected_blocks=4),
    "one index head": replace(TINY, index_block_size=2, index_stride=2, index_heads=1),
    "two index heads, keys that overlap": replace(TINY, index_block_size=4, index_stride=2, index_heads=2),
    "nothing forced": replace(TINY, index_heads=1, num_init_blocks=0, num_local_blocks=0),
}
"""For loops over every number."""
tiny_configs = pytest.mark.parametrize("config", TINY_CONFIGS.values(), ids=TINY_CONFIGS)
impls = pytest.mark.parametrize("impl", ["sdpa", "reference"])
weights = pytest.mark.parametrize("query_weights", ["mass", "mean"])


def make(
    seq_len: int,
    config: NSAConfig,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    dtype: torch.dtype = FP64,
    documents: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Arguments of a loss; ``k_cmp`` and ``q_index`` require a gradient."""
    generator = torch.Generator().manual_seed(seq_len)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FP64).to(dtype)

    heads, num_keys = kv_heads * group, num_compressed(seq_len, config.scoring)
    made: dict[str, Any] = {"q": randn(batch, heads, seq_len, dim) * 2, "k": randn(batch, kv_heads, seq_len, dim)}
    made |= {"k_cmp": randn(batch, kv_heads, num_keys, dim).requires_grad_(), "config": config}
    if config.index_heads is not None:
        made["q_index"] = randn(batch, kv_heads * config.index_heads, seq_len, dim).requires_grad_()
    if documents:
        made["document_ids"] = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)).expand(batch, -1)
    return made


def learners(x: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x[name] for name in ("k_cmp", "q_index") if name in x}


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
@tiny_configs
@pytest.mark.parametrize("seq_len", [1, 3, 4, 8, 13, 43])
def test_value_and_gradient_are_those_of_the_definition(seq_len: int, config: NSAConfig, query_weights: str) -> None:
    x = make(seq_len, config, batch=1, kv_heads=1)
    want = by_definition(x, query_weights)
    for impl in ("sdpa", "reference"):
        assert_equal(summed(x, query_weights=query_weights, impl=impl), want)
    assert bool(want["total"] > 0) == (seq_len == 43 or (seq_len == 13 and config.num_init_blocks == 0))


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
@configs
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
@pytest.mark.parametrize("seq_len", [129, 500])
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


@configs
def test_chunks_of_queries_change_nothing(config: NSAConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(100, config, documents=(61, 39))
    want = summed(x), block_shares(x["q"], x["k"], config=config)
    monkeypatch.setattr("flexnsa.attention.shares.CHUNK_SCORES", 4000)
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


# Which queries: a function of integers.


@pytest.mark.parametrize(("seq_len", "count"), [(8192, 256), (1000, 256), (100, 99), (100, 1)])
def test_each_stretch_gives_one_query(seq_len: int, count: int) -> None:
    tokens = sampled_tokens(seq_len, count, 0, 0, torch.arange(3))
    edges = torch.arange(count + 1) * seq_len // count
    assert ((tokens >= edges[:-1]) & (tokens < edges[1:])).all()


def test_a_short_sequence_gives_all_of_its_queries() -> None:
    assert sampled_tokens(5, 256, 1, 2, torch.arange(2)).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_tokens_are_drawn_evenly_and_differ_by_seed_step_and_sequence() -> None:
    tokens = sampled_tokens(64 * 100, 100, 0, 0, torch.arange(500)) % 64
    counts = tokens.flatten().bincount(minlength=64)
    assert ((counts - 50_000 / 64).abs() < 5 * (50_000 / 64) ** 0.5).all()
    first, ids = sampled_tokens(6400, 100, 0, 0, torch.arange(1)), torch.arange(1)
    for other in ((1, 0, ids), (0, 1, ids), (0, 0, ids + 1), (2**40, 0, ids)):
        assert (sampled_tokens(6400, 100, *other) != first).float().mean() > 0.9


def test_seed_and_step_may_be_tensors() -> None:
    for number in (0, 7, 2**40 + 3, -5):
        as_tensor = sampled_tokens(640, 10, torch.tensor(number), torch.tensor(number + 1), torch.arange(4))
        assert torch.equal(as_tensor, sampled_tokens(640, 10, number, number + 1, torch.arange(4)))


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


# True shares, and what a choice finds of them.


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


# Index heads score in place of the compressed branch.

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
