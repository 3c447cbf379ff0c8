"""Indexers of models of transformers: what teaches them, however a model is called, and what leaves them alone."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.layers.indexer import Indexer
from flexnsa.optim import index_parameters
from flexnsa.transformers import convert, recall, to_dense
from flexnsa.transformers.parallel import keep_local_heads
from flexnsa.transformers.schedule import pretrained_parameters
from tests.integrations.transformers.families import (
    ALL,
    FAMILIES,
    FEW,
    INDEX,
    INDEXED,
    alive,
    converted,
    dense,
    own,
    pad_left,
    sparse,
    tokens,
)

MODELS: dict[str, Any] = {family: lambda family=family: converted(family, INDEXED) for family in FAMILIES}
MODELS["shared index"] = lambda: converted("llama", INDEXED | {"share_index": 2})
MODELS["own decoder"] = lambda: alive(own(nsa=FEW | INDEX, index_rank=4))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]().train()


def teach(model: Any, x: Tensor, **options: Any) -> tuple[SelectionLoss, Tensor]:
    """Call a model with a loss that compares all queries; return it, and the loss of language."""
    selection = SelectionLoss()
    out = model(x, labels=x, selection=selection, use_cache=False, **options)
    return selection, out.loss


def total_of(selection: SelectionLoss) -> Tensor:
    assert isinstance(selection.total, Tensor)
    return selection.total


def learned(model: Any, selection: SelectionLoss) -> list[Tensor]:
    """Return the sums and weights of a loss, and the gradients of its sums."""
    gradients = torch.autograd.grad(torch.stack(selection.sums).sum(), index_parameters(model))
    return [torch.stack(selection.sums).detach(), torch.stack(selection.weights), *gradients]


def test_the_loss_teaches_the_indexers_and_nothing_else(model: Any) -> None:
    x, parameters = tokens(2, 60), dict(model.named_parameters())
    selection, loss = teach(model, x)
    assert len(selection.sums) == 2
    for loss_of_layer in selection.sums:
        of_layer = torch.autograd.grad(loss_of_layer, index_parameters(model), retain_graph=True, allow_unused=True)
        assert any(gradient is not None and gradient.any() for gradient in of_layer)
    gradients = torch.autograd.grad(total_of(selection), list(parameters.values()), allow_unused=True)
    reached = {name: x for name, x in zip(parameters, gradients, strict=True) if x is not None}
    assert reached.keys() == {name for name in parameters if ".indexer." in name}
    assert all(gradient.any() for gradient in reached.values())
    others = [parameter for name, parameter in parameters.items() if ".indexer." not in name]
    with pytest.warns(UserWarning, match="selection: expected a SelectionLoss"):
        untaught = model(x, labels=x, use_cache=False).loss
    assert_close(torch.autograd.grad(loss, others), torch.autograd.grad(untaught, others))


@pytest.mark.parametrize("kind", ["left", "right", "packed"])
def test_rows_that_are_padded_or_packed_teach_what_they_teach_alone(model: Any, kind: str) -> None:
    rows = [tokens(60), tokens(37), tokens(5)]
    batch: dict[str, Any] = pad_left(rows)
    if kind == "right":
        batch = {name: x.flip(1) for name, x in pad_left([row.flip(0) for row in rows]).items()}
    elif kind == "packed":
        collated: Any = DataCollatorWithFlattening()([{"input_ids": row.tolist()} for row in rows])
        batch = {name: collated[name] for name in ("input_ids", "position_ids")}
    got = learned(model, teach(model, batch.pop("input_ids"), **batch)[0])
    alone = [learned(model, teach(model, row[None])[0]) for row in rows]
    for value, *want in zip(got, *alone, strict=True):
        assert_close(value, torch.stack(want).sum(0))


@pytest.mark.parametrize("name", ["llama", "shared index"])
def test_a_checkpoint_in_which_nothing_could_be_taught_is_refused(name: str) -> None:
    model = MODELS[name]().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"gradient_checkpointing_kwargs: expected {'use_reentrant': False} .* 2 of 2"):
        teach(model, tokens(1, 30))
    model.gradient_checkpointing_disable()
    model.model.nsa_layers[-1].eval()  # which is right, and teaches nothing
    assert len(teach(model, tokens(1, 30))[0].sums) == 1


@pytest.mark.filterwarnings("ignore:selection")
def test_a_checkpoint_that_teaches_nothing_may_run_without_a_gradient_first() -> None:
    """Backward then runs a layer that follows before the one whose blocks it reads."""
    model, x, found = MODELS["shared index"]().train(), tokens(1, 60), list[list[Tensor]]()
    model.enable_input_require_grads()
    for begin in (model.zero_grad, lambda: model.gradient_checkpointing_enable({"use_reentrant": True})):
        begin()
        model.zero_grad()
        model(x, labels=x, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert_close(*found)


def test_nothing_is_added_where_nothing_is_learned(model: Any) -> None:
    x = tokens(1, 40)
    with torch.no_grad():
        assert not teach(model, x)[0].sums
    assert not teach(model.eval(), x)[0].sums
    model.train()


def test_training_without_a_loss_warns_once_and_gives_gradients_of_0(model: Any) -> None:
    model.zero_grad()
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("default")
        for _ in range(2):
            model(tokens(1, 40), labels=tokens(1, 40), use_cache=False).loss.backward()
    texts = [str(warning.message) for warning in met]
    assert sum("selection: expected a SelectionLoss" in text for text in texts) == 1
    assert all(x.grad is not None and not x.grad.any() for x in index_parameters(model))


def test_embeddings_in_place_of_tokens_teach_the_same() -> None:
    model, x = MODELS["llama"]().train(), tokens(2, 40)
    selection = SelectionLoss()
    model(inputs_embeds=model.get_input_embeddings()(x), selection=selection, use_cache=False)
    assert_close(total_of(selection), total_of(teach(model, x)[0]))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_indexer_selects_what_means_of_keys_select(family: str) -> None:
    means, indexed = (
        convert(dense(family), replace(NSAConfig(**FEW), **index), branches=["slc"])(tokens(2, 70)).logits
        for index in ({}, {"index_heads": 3})
    )
    assert_close(indexed, means)


@torch.no_grad()
def test_an_indexer_reads_the_keys_of_the_selected_branch() -> None:
    model, x = converted("llama", INDEXED), tokens(2, 70)
    model.config.flexnsa["opening"] = 0.0
    want = model(x).logits
    for layer in model.model.layers:
        layer.self_attn.k_proj_cmp.weight.neg_()
    assert_close(model(x).logits, want)
    model.model.layers[0].self_attn.indexer.change_q.up.weight.neg_()
    assert not torch.equal(model(x).logits, want)


def test_a_new_indexer_begins_without_changes_in_whatever_way_it_is_made(tmp_path: Path) -> None:
    three = convert(dense("llama"), NSAConfig(**FEW | INDEX), index_rank=4)
    three.save_pretrained(tmp_path / "converted")
    fresh = own(nsa=FEW | INDEX, index_rank=4)
    fresh.save_pretrained(tmp_path / "own")
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("converted", "own")]
    for model in (three, type(three)(three.config), fresh, *loaded):
        indexers = [module for module in model.modules() if isinstance(module, Indexer)]
        assert len(indexers) == 2
        for indexer in indexers:
            assert not indexer.change_q.up.weight.any()
            assert not indexer.change_k.up.weight.any()
            assert all(change.down is not None and change.down.weight.any() for change in (indexer.change_q,))


def test_an_indexer_is_new_to_a_schedule_and_no_part_of_a_dense_model() -> None:
    model = converted("qwen3", ALL | INDEX | {"branches": ["slc"]})
    assert not {*map(id, pretrained_parameters(model))} & {*map(id, index_parameters(model))}
    x = tokens(1, 60)
    assert_close(to_dense(model)(x).logits, model(x).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_recall_is_1_where_all_blocks_are_selected_and_else_between(family: str) -> None:
    x = tokens(2, 70)
    assert_close(recall(converted(family, ALL | INDEX), x), torch.ones(2, 2))
    found = recall(converted(family, INDEXED), x)
    assert ((found > 0.1) & (found < 0.999)).all()


WRONG: list[tuple[str, Any]] = [
    ("selection: expected None without an indexer", lambda: teach(converted("llama", FEW).train(), tokens(1, 9))),
    ("selection: expected None without an indexer", lambda: teach(own().train(), tokens(1, 9))),
    ("selection: expected SelectionLoss", lambda: converted("llama", INDEXED)(tokens(1, 9), selection=1)),
    ("model: expected a converted one with the branch slc", lambda: recall(dense("llama"), tokens(1, 9))),
    ("model: expected a converted", lambda: recall(converted("llama", FEW | {"branches": ["win"]}), tokens(1, 9))),
    (
        "attention_mask: expected",
        lambda: teach(converted("llama", INDEXED).train(), tokens(2, 9), attention_mask=torch.eye(9)[:3]),
    ),
    ("input_ids: expected", lambda: recall(converted("llama", FEW), tokens(9))),
    ("selection: expected SelectionLoss", lambda: MODELS["own decoder"]()(tokens(1, 9), selection=1)),
    ("index_heads: expected a divisor of the 3 ", lambda: converted("llama", FEW | {"index_heads": 2})),
    ("index_heads: expected None without the branch", lambda: converted("llama", INDEXED | {"branches": ["win"]})),
    ("index_rank: expected None without index_heads", lambda: converted("llama", FEW | {"index_rank": 2})),
    ("index_rank: expected", lambda: converted("llama", FEW | INDEX | {"index_rank": 0})),
    (r"config.flexnsa: expected some of .*, got 'index_heads'", lambda: sparse("llama", FEW | INDEX)(tokens(1, 9))),
    (
        "tp_size: expected index_heads=None",
        lambda: keep_local_heads(converted("llama", INDEXED).model.layers[0].self_attn, 2),
    ),
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=[message for message, _ in WRONG])
def test_a_wrong_argument_is_named(message: str, call: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
