"""What a layer computes: documents apart from each other, nothing from the future, and dense projections at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from flexnsa import SelectionLoss
from flexnsa.torchtitan.checkpointing import KeepingSelection
from flexnsa.torchtitan.options import Options
from flexnsa.torchtitan.teaching import Teaching
from tests.integrations.torchtitan.configs import VOCAB
from tests.integrations.torchtitan.models import built, layers_of, positions_of, teach
from tests.integrations.torchtitan.runs import FEW, INDEXER, config_of
from tests.support.operators import Operators

KINDS: dict[str, dict[str, Any]] = {
    "three branches": FEW,
    "an indexer": INDEXER,
    "a shared index": INDEXER | {"share_index": 2},
    "low rank": INDEXER | {"index_rank": 4},
    "shared keys": INDEXER | {"shared_keys": True, "compression": "mlp"},
    "one branch": FEW | {"branches": ["slc"]},
    "means": FEW | {"compression": "mean"},
}
LENGTHS = (70, 3, 55)

every_kind = pytest.mark.parametrize("kind", KINDS)
every_family = pytest.mark.parametrize("family", ["llama", "llama_apart", "qwen3"])


def draw(length: int) -> Tensor:
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))


@every_kind
@every_family
@torch.no_grad()
def test_packed_documents_are_apart(family: str, kind: str) -> None:
    model, tokens = built(family, **KINDS[kind]).eval(), draw(sum(LENGTHS))
    packed = model(tokens, positions=positions_of(*LENGTHS))
    apart = [model(document, positions=positions_of(document.shape[1])) for document in tokens.split(LENGTHS, 1)]
    assert_close(packed, torch.cat(apart, 1), rtol=1e-4, atol=1e-4)


@every_kind
@torch.no_grad()
def test_a_token_changes_nothing_before_it_and_in_other_documents(kind: str) -> None:
    model, tokens = built("llama", **KINDS[kind]).eval(), draw(sum(LENGTHS))
    before = model(tokens, positions=positions_of(*LENGTHS))
    tokens[0, 40] += 1
    changed = (model(tokens, positions=positions_of(*LENGTHS)) - before).abs().amax((0, 2)) > 1e-6
    assert not changed[:40].any()
    assert changed[40:70].all()
    assert not changed[70:].any()


@every_kind
@torch.no_grad()
def test_positions_are_counted_where_rows_are_whole(kind: str) -> None:
    model, tokens = built("qwen3", **KINDS[kind], packed=False).eval(), draw(128)
    assert_close(model(tokens, positions=positions_of(128)), model(tokens))
    with pytest.raises(ValueError, match=r"^packed: expected True for rows of several documents, got False"):
        model(tokens, positions=positions_of(*LENGTHS))


@every_kind
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_parameter_learns(family: str, kind: str) -> None:
    model, tokens = built(family, **KINDS[kind]).train(), draw(128)
    teach(model)
    model(tokens, positions=positions_of(100, 28)).logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not [name for name, x in gradients.items() if x is None or not x.isfinite().all() or not x.any()]


@torch.no_grad()
def test_attention_of_a_mixture_of_experts_is_replaced_too() -> None:
    spec: Any = config_of("qwen3_moe", Path()).model_spec
    spec.model.layers = spec.model.layers[:2]
    dense, sparse = spec.model.build(), built("qwen3_moe", **FEW | {"num_selected_blocks": 8, "branches": ["slc"]})
    dense.init_states()
    sparse.load_state_dict(dense.state_dict())
    assert len(layers_of(sparse)) == len(dense.layers)
    assert_close(sparse(draw(128)), dense(draw(128)), rtol=1e-3, atol=1e-3)  # experts compute in bf16


def test_the_selection_loss_reaches_the_indexers_alone_with_its_weight() -> None:
    gradients = []
    for weight in (0.0, 1.0, 3.0):
        model = built("llama", **INDEXER, selection_loss_weight=weight).train()
        teach(model)
        model(draw(128), positions=positions_of(128)).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    none, one, three = gradients
    for name in one:
        if ".indexer." in name:
            assert not none[name].any()
            assert_close(three[name], 3 * one[name])
        else:
            assert_close(three[name], none[name])


def test_the_loss_is_a_mean_over_the_queries_of_all_sequences_and_heads_of_a_step() -> None:
    options = Options.of({**INDEXER, "selection_loss_weight": 3.0})
    taught = Teaching(options, num_heads=2, sequences=5, step=torch.tensor(1))
    out, summed, weight = (torch.full(size, 7.0, requires_grad=True) for size in ((4, 3), (), ()))
    for seq_len, queries in ((128, options.num_queries), (10, 10)):
        selection = SelectionLoss()
        selection.add(summed, weight.detach())
        out.grad = summed.grad = None
        attached = taught.attach(out, selection, seq_len)
        assert torch.equal(attached, out)
        (2 * attached).sum().backward()
        assert_close(out.grad, torch.full_like(out, 2.0))
        assert_close(summed.grad, torch.tensor(3.0 / (5 * 2 * queries)))
    assert taught.take().tolist() == [14.0, 14.0]
    assert taught.take().tolist() == [0.0, 0.0]


def test_each_step_learns_from_queries_of_its_own() -> None:
    model = built("llama", **INDEXER).train()
    learned = []
    for step in (1, 2, 1):
        model.zero_grad()
        teach(model, step)
        model(draw(128)).sum().backward()
        learned.append(layers_of(model)[0].indexer.change_k.up.weight.grad)
    assert torch.equal(learned[0], learned[2])
    assert not torch.equal(learned[0], learned[1])


def test_an_indexer_that_nobody_teaches_is_refused() -> None:
    model = built("llama", **INDEXER)
    model.eval()(draw(32))
    with pytest.raises(
        ValueError, match=r"^metrics: expected the override's, which teach a layer with an indexer, got"
    ):
        model.train()(draw(32))


@every_family
@torch.no_grad()
def test_new_branches_start_as_the_dense_ones(family: str) -> None:
    model = built(family, **FEW)
    dense = {name: tensor for name, tensor in model.state_dict().items() if "w_" not in name}
    for name in dense:
        dense[name] = dense[name] + 1
    model.load_state_dict(dense, strict=False)
    for layer in layers_of(model):
        state = layer.state_dict()
        for tag in ("cmp", "win"):
            for kind in "kv":
                assert torch.equal(state[f"w_{kind}_{tag}.weight"], state[f"qkv_linear.w{kind}.weight"])
    own = built(family, **FEW).state_dict()
    model.load_state_dict(own)
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("kind", "times"), [(SelectiveAC, 2), (KeepingSelection, 1)])
def test_a_checkpointed_layer_keeps_its_selection(kind: Any, times: int) -> None:
    model = built("llama", **INDEXER).train()
    teach(model)
    kind.Config().build().apply(model)
    with Operators() as ran:
        model(draw(128), positions=positions_of(128)).sum().backward()
    for name in ("select_in_chunks", "selection_loss"):
        assert len(ran.calls[name]) == times * len(layers_of(model)), name
