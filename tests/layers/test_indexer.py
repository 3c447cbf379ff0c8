"""A layer with an indexer: what it scores blocks by, what teaches it, and what that leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss, select_blocks, selection_loss
from flexnsa.layers.compression import average_blocks
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.rope import apply_rope
from flexnsa.lm import preset
from flexnsa.optim import parameter_groups
from flexnsa.parallel.layers_of import check_not_shared
from tests.support.decoding import taught, tokens
from tests.support.inputs import SMALL

INDEXED = replace(SMALL, index_heads=2, index_block_size=4, index_stride=4)
ALL_FREE = replace(INDEXED, num_init_blocks=0, num_local_blocks=0)
FOUR = {"select_block_size": 16, "num_selected_blocks": 4}
KINDS: dict[str, dict[str, Any]] = {
    "a head for each query head": {"config": INDEXED},
    "one head, keys that overlap": {"config": replace(SMALL, index_heads=1, index_block_size=8, index_stride=4)},
    "nothing forced, a key for each token": {"config": replace(ALL_FREE, index_block_size=1, index_stride=1)},
    "low rank": {"config": INDEXED, "index_rank": 3},
    "linear": {"config": INDEXED, "compression": "linear"},
    "without the compressed branch": {"config": INDEXED, "branches": ("slc", "win")},
    "shared keys": {"config": INDEXED, "shared_keys": True},
    "reference": {"config": INDEXED, "impl": "reference"},
    "best keys": {"config": replace(INDEXED, index_block_size=1, index_stride=1, index_heads=1, index_score="max")},
    "units": {"config": NSAConfig.qsa(**FOUR, index_head_dim=4), "branches": ("slc",)},
    "best keys alone": {"config": NSAConfig.msa(**FOUR, index_head_dim=12), "branches": ("slc",)},
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str = "a head for each query head", **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(32, 4, 2, 8, **KINDS[kind] | options)


def select(layer: NativeSparseAttention, x: Tensor, **given: Any) -> Tensor:
    """Return the blocks that a layer selects."""
    layout = layer.layout(x.shape[1], given.get("document_ids"))
    _, read = layer.attend(x, layer.project(x), layout, RowKeys(), (None, None), cached=False)
    assert read.block_indices is not None
    return read.block_indices


@pytest.mark.parametrize("index_heads", [1, 2])
def test_an_untaught_indexer_scores_by_the_means_of_the_layers_queries_and_keys(index_heads: int) -> None:
    config = replace(INDEXED, index_heads=index_heads)
    layer, x = make(config=config), tokens(2, 150)
    heads, layout = layer.project(x), layer.layout(150)
    k_index = apply_rope(average_blocks(heads.k["slc"], None, config.scoring), layout.blocks["index"].tables)
    q_index = apply_rope(heads.q.unflatten(1, (2 * index_heads, -1)).mean(2), layout.tokens)
    q = apply_rope(heads.q, layout.tokens)
    expected = select_blocks(q, None, q_index=q_index, k_index=k_index, config=config)
    assert (select(layer, x) == expected).float().mean() > 0.999  # another order of sums may break a tie


@of_every_kind
def test_a_layer_draws_the_same_numbers_with_and_without_an_indexer(kind: str) -> None:
    options = {"config": SMALL, "index_rank": None, "impl": "sdpa"}
    without, layer = make(kind, **options), make(kind)
    for name, parameter in without.named_parameters():
        torch.testing.assert_close(parameter, layer.get_parameter(name), rtol=0, atol=0)


@of_every_kind
def test_the_loss_teaches_the_indexer_and_nothing_else(kind: str) -> None:
    layer, x = taught(make(kind)), tokens(2, 150).requires_grad_()
    selection = SelectionLoss(seed=3, step=5, num_queries=40)
    out = layer(x, selection=selection)
    total = torch.as_tensor(selection.total)
    names = [name for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(total, [x, *layer.parameters()], retain_graph=True, allow_unused=True)
    assert {name for name, gradient in zip(["x", *names], found, strict=True) if gradient is not None} == {
        name for name in names if name.startswith("indexer.")
    }
    assert all(gradient is None or gradient.any() for gradient in found)
    others = [parameter for name, parameter in layer.named_parameters() if not name.startswith("indexer.")]
    with pytest.warns(UserWarning, match="selection"):
        alone = layer(x)
    got, want = (torch.autograd.grad(each.sum(), others) for each in (out, alone))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@of_every_kind
def test_loss_and_gradient_are_those_of_the_function(kind: str) -> None:
    layer, x = taught(make(kind)), tokens(2, 150)
    learns = list(layer.indexer.parameters())
    for ids in (None, torch.tensor([[0] * 150, [0] * 61 + [1] * 89])):
        given = {"seed": 3, "step": 5, "num_queries": 40, "sequence_ids": torch.tensor([7, 2])}
        selection = SelectionLoss(**given)
        layer(x, selection=selection, document_ids=ids)
        total = torch.as_tensor(selection.total)

        layout, heads = layer.layout(150, ids), layer.project(x)
        _, read = layer.attend(x, heads, layout, RowKeys(), (None, None), cached=False)
        assert read.keys.k_slc is not None
        q_index = apply_rope(layer.indexer.queries(x, heads.q), layout.tokens)  # of all tokens
        torch.testing.assert_close(q_index.detach(), read.scorer.q, rtol=0, atol=0)
        keys = {"q_index": q_index, "config": layer.config, "document_ids": ids, "impl": "reference"}
        expected = selection_loss(read.q, read.keys.k_slc, read.scorer.k, **keys, **given)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)
        both = zip(torch.autograd.grad(total, learns), torch.autograd.grad(expected, learns), strict=True)
        for got, want in both:
            torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * want.abs().max().item())


def test_queries_that_select_have_no_gradient() -> None:
    index = make().project(tokens(1, 60)).index
    assert not index.q.requires_grad
    assert index.k.requires_grad


@pytest.mark.parametrize("query_weights", ["mass", "mean"])
@of_every_kind
def test_padded_sequences_teach_what_they_teach_alone(kind: str, query_weights: str) -> None:
    layer, x, lengths = taught(make(kind)), tokens(4, 150), torch.tensor([150, 0, 61, 100])

    def learned(x: Tensor, ids: Tensor, lengths: Tensor | None) -> list[Tensor]:
        selection = SelectionLoss(num_queries=100, sequence_ids=ids, query_weights=query_weights)
        selection.tokens(x, x.shape[1], lengths)
        layer(x, selection=selection)
        grads = torch.autograd.grad(selection.sums[0], list(layer.indexer.parameters()))
        return [selection.sums[0].detach(), selection.weights[0], *grads]

    ids = torch.arange(4)
    alone = [learned(x[[row], : int(lengths[row])], ids[[row]], None) for row in (0, 2, 3)]
    for got, *want in zip(learned(x, ids, lengths), *alone, strict=True):
        torch.testing.assert_close(got, torch.stack(want).sum(0), rtol=1e-4, atol=1e-5)


def test_a_few_steps_of_the_loss_find_more_of_the_true_mass() -> None:
    layer, x = make(), 3 * tokens(4, 200)
    optimizer = torch.optim.Adam(layer.indexer.parameters() if layer.indexer else [], lr=1e-2)
    losses: list[float] = []
    for step in range(30):
        selection = SelectionLoss(step=step)
        layer(x, selection=selection)
        total = torch.as_tensor(selection.total)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    assert losses[-1] < 0.5 * losses[0]


@of_every_kind
def test_packed_documents_equal_each_alone(kind: str) -> None:
    layer, x = taught(make(kind)).requires_grad_(False), tokens(1, 157)
    lengths = [70, 3, 84]
    document_ids = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    packed = layer(x, document_ids=document_ids)
    for part, alone in zip(packed.split(lengths, 1), x.split(lengths, 1), strict=True):
        torch.testing.assert_close(part, layer(alone), rtol=0, atol=1e-5)


@of_every_kind
def test_the_future_changes_nothing(kind: str) -> None:
    layer, x = taught(make(kind)).requires_grad_(False), tokens(1, 150)
    changed = x.clone()
    changed[:, 100:] = 5 * torch.randn(1, 50, 32)
    assert torch.equal(select(layer, x)[:, :, :100], select(layer, changed)[:, :, :100])
    torch.testing.assert_close(layer(x)[:, :100], layer(changed)[:, :100], rtol=0, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_without_training_nothing_is_added(context: Callable[[], Any]) -> None:
    layer, x = make(), tokens(1, 100)
    layer.train(context is torch.no_grad)
    selection = SelectionLoss()
    with context():
        layer(x, selection=selection)
    assert selection.total == 0
    assert not selection.sums


def test_training_without_the_loss_warns_once_and_gives_gradients_of_0() -> None:
    layer, x = make(), tokens(1, 100)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("default")
        for _ in range(2):
            layer(x).sum().backward()
    assert len([warning for warning in met if "selection: expected a SelectionLoss" in str(warning.message)]) == 1
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.indexer.parameters())


def test_a_loss_is_of_one_pass() -> None:
    layer, used = make(), SelectionLoss()
    layer(tokens(2, 100), selection=used)
    for x in (tokens(1, 100), tokens(3, 100), tokens(2, 60), tokens(2, 140)):
        with pytest.raises(ValueError, match=r"^selection: expected a new SelectionLoss .* 2 sequences of 100 tokens"):
            layer(x, selection=used)


def test_a_checkpointed_layer_adds_its_loss_once_or_says_why_not() -> None:
    layer, x = taught(make()), tokens(2, 100).requires_grad_()
    plain, again, lost = SelectionLoss(), SelectionLoss(), SelectionLoss()

    def gradients(out: Tensor, selection: SelectionLoss) -> list[Tensor]:
        return list(torch.autograd.grad(out.square().sum() + selection.total, list(layer.parameters())))

    want = gradients(layer(x, selection=plain), plain)
    got = gradients(checkpoint(layer, x, selection=again, use_reentrant=False), again)
    torch.testing.assert_close(got, want)
    assert len(again.sums) == 1  # backward ran the layer again
    out = checkpoint(lambda x: layer(x, selection=lost), x, use_reentrant=True)
    with pytest.raises(ValueError, match=r"^selection: expected checkpoint\(\.\.\., use_reentrant=False\)"):
        out.sum().backward()


def test_a_compiled_layer_gives_the_same_loss_and_compiles_once() -> None:
    layer, x = taught(make(compression="mean")), tokens(2, 120)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        for step in range(3):
            own, other = SelectionLoss(step=torch.tensor(step)), SelectionLoss(step=step)
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                out = compiled(x, selection=own)
            torch.testing.assert_close(out, layer(x, selection=other))
            torch.testing.assert_close(own.total, other.total)


def test_indexers_have_a_rate_of_their_own() -> None:
    layer = make()
    groups = parameter_groups(layer, lr=1.0, compressor_lr=0.1, indexer_lr=0.5)
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    assert {rates[p] for name, p in layer.named_parameters() if name.startswith("indexer.")} == {0.5}
    assert {rates[p] for name, p in layer.named_parameters() if name.startswith("phi_")} == {0.1}


X = tokens(1, 40)
WRONG: list[tuple[str, Callable[[], object]]] = [
    ("index_heads: expected a divisor of the 2 ", lambda: make(config=replace(SMALL, index_heads=3))),
    ("index_heads: expected None without the branch slc", lambda: make(branches=("cmp", "win"))),
    ("index_rank: expected None without index_heads", lambda: make(config=SMALL, index_rank=2)),
    ("index_rank: expected", lambda: make(index_rank=0)),
    ("index_rank: expected None with index_score='max'", lambda: make("best keys", index_rank=2)),
    ("index_score: expected None with a score_mod", lambda: make("best keys")(X, score_mod=lambda s, *_: s)),
    ("index_score: expected None of a layer that ranks", lambda: check_not_shared(make("best keys"), int, "heads")),
    ("index_score: expected None of a language model", lambda: replace(preset("small"), nsa=NSAConfig.msa())),
    ("selection: expected None without an indexer", lambda: make(config=SMALL)(X, selection=SelectionLoss())),
    ("selection: expected SelectionLoss", lambda: make()(X, selection=1)),
    ("num_queries: expected", lambda: SelectionLoss(num_queries=0)),
    ("query_weights: expected", lambda: SelectionLoss(query_weights="all")),
    ("seed: expected", lambda: SelectionLoss(seed=2**64)),
    ("sequence_ids: expected", lambda: make()(X, selection=SelectionLoss(sequence_ids=torch.tensor([0, 1])))),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message for message, _ in WRONG])
def test_a_wrong_argument_is_named(message: str, call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_config_with_other_branches_keeps_its_indexer_only_for_the_selected_one() -> None:
    config = LayerConfig(dim=32, num_heads=4, num_kv_heads=2, head_dim=8, nsa=INDEXED, index_rank=2)
    assert config.with_branches(("slc",)).nsa == INDEXED
    assert config.with_branches(("cmp", "win")) == replace(config, branches=("cmp", "win"), nsa=SMALL, index_rank=None)
    assert isinstance(config.nsa, NSAConfig)
