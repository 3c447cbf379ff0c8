"""A dense stage of a layer: what the layer computes where it selects all blocks, by fused attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from flexnsa.layers.layouts import RowKeys
from flexnsa.lm import DecoderLM, preset
from tests.support.inputs import TINY

ALL = replace(TINY, num_selected_blocks=8, window_size=12, index_block_size=8, index_stride=8, index_heads=2)
"""Sizes that select all blocks of 64 tokens."""
BEST_KEYS: dict[str, Any] = {"index_block_size": 1, "index_stride": 1, "index_heads": 1, "index_score": "max"}
UNITS = replace(ALL, num_selected_blocks=9, num_init_blocks=0, num_local_blocks=1, index_score="relu")


def layer(branches: tuple[str, ...] = ("cmp", "slc", "win"), **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    options = {"config": ALL, "gate": "sigmoid"} | options
    return NativeSparseAttention(32, 4, 2, 16, branches=branches, **options).double()


def gradients(module: NativeSparseAttention, x: Tensor, **options: Any) -> dict[str, Tensor | None]:
    selection = SelectionLoss(num_queries=16, seed=0, step=0)
    out = module(x, selection=selection, **options)
    (out.sin().sum() + selection.total).backward()
    return {"out": out.detach()} | {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("config", [ALL, replace(ALL, **BEST_KEYS), UNITS], ids=["mass", "best keys", "units"])
@pytest.mark.parametrize("documents", [False, True])
def test_it_changes_nothing_where_all_blocks_are_selected(documents: bool, config: NSAConfig) -> None:
    x = torch.randn(2, 64, 32, dtype=torch.float64)
    options = {"document_ids": (torch.arange(64) >= 30).long().expand(2, -1)} if documents else {}
    sparse, dense = layer(config=config), layer(config=config)
    dense.attend_densely(("cmp", "slc", "win"))
    assert dense.eval()(x, return_index=True)[1].block_indices.shape == (2, 2, 64, 0)
    dense.train()
    expected, found = gradients(sparse, x, **options), gradients(dense, x, **options)
    assert expected["w_k_slc.weight"] is not None
    assert_close(found, expected)


def test_branches_that_are_left_out_learn_nothing_and_come_back() -> None:
    x = torch.randn(1, 64, 32, dtype=torch.float64)
    module, alone = layer(), layer(branches=("slc",))
    state = {name: x for name, x in module.state_dict().items() if name != "gate.linear.weight"}
    alone.load_state_dict(state, strict=False)
    with torch.no_grad():
        alone.gate.linear.weight.copy_(module.gate.linear.weight.unflatten(0, (4, 3))[:, 1])
    expected = module(x)
    module.attend_densely()
    hook = module.get_submodule("w_k_win").register_forward_pre_hook(lambda *_: pytest.fail("the window is projected"))
    assert_close(module(x), alone(x))
    grads = gradients(module, x)
    assert [grads[f"w_{name}.weight"] for name in ("v_cmp", "k_win", "v_win")] == [None] * 3
    assert grads["w_v_slc.weight"] is not None
    assert any(value is not None and value.any() for name, value in grads.items() if name.startswith("indexer"))
    hook.remove()
    module.attend_densely(None)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("whole", [False, True])
def test_indexers_may_learn_later(whole: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Without a selection loss training warns of indexers that learn nothing, but the stage leaves them out."""
    model = DecoderLM(preset("text-small", num_layers=1))
    module = model if whole else next(part for part in model.modules() if isinstance(part, NativeSparseAttention))
    x = torch.zeros(1, 64, dtype=torch.int64) if whole else torch.randn(1, 64, model.config.dim)
    for branches, warned in ((("slc",), False), (None, True)):
        module.attend_densely(branches)
        module(x).sum().backward()
        assert any("selection: expected a SelectionLoss" in str(each.message) for each in recwarn.list) == warned
        grads = [value.grad for value in model.indexers()[0].parameters()]
        assert all(grad is not None and not grad.any() if warned else grad is None for grad in grads)


def test_a_cache_is_read_sparsely() -> None:
    x, module = torch.randn(1, 64, 32, dtype=torch.float64), layer().eval()
    with torch.no_grad():
        expected = module(x, cache=module.new_cache(1, 64))
        module.attend_densely()
        assert torch.equal(module(x, cache=module.new_cache(1, 64)), expected)


class KeysOfRanks:
    """A source of keys as ranks that share the tokens have one: here, of all tokens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(RowKeys(), name)


def test_ranks_that_share_tokens_attend_sparsely() -> None:
    x, module = torch.randn(1, 96, 32, dtype=torch.float64), layer()
    expected = module(x)
    module.attend_densely()
    assert not torch.allclose(module(x), expected)
    assert torch.equal(module(x, layout=replace(module.layout(96), source=KeysOfRanks())), expected)


@pytest.mark.parametrize("branches", [("cmp",), ("slc", "all"), (), "slc", 3])
def test_branches_that_a_layer_lacks_or_that_are_no_sequence_are_named(branches: Any) -> None:
    error, what = (ValueError, "slc and others") if isinstance(branches, tuple) else (TypeError, "a sequence of names")
    with pytest.raises(error, match=f"branches: expected {what}"):
        layer().attend_densely(branches)


def test_sinks_take_their_share_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (sparse, dense) = torch.randn(1, 64, 32, dtype=torch.float64), (layer(), layer())
    for module in (sparse, dense):
        described = module.attention()._replace(sinks=torch.full((4,), 0.7, dtype=torch.float64))
        monkeypatch.setattr(module, "attention", lambda described=described: described)
    dense.attend_densely(("cmp", "slc", "win"))
    assert_close(dense(x), sparse(x))


def test_longer_sequences_after_a_stage_without_a_loss_share_a_graph() -> None:
    """What the stage itself does not read would otherwise have a constant size in the first graph that reads it."""
    torch.compiler.reset()  # which sizes vary is remembered from other models
    eager, model = (DecoderLM(preset("text-small", num_layers=1, compression="mean")) for _ in range(2))
    model.load_state_dict(eager.state_dict())
    graphs = CompileCounterWithBackend("eager")
    model.compile_layers(backend=graphs)
    for batch, length, branches in ((8, 128, ("slc",)), (4, 256, None), (2, 512, None)):
        losses, tokens = list[Tensor](), torch.randint(256, (batch, length))
        for each in (eager, model):
            each.attend_densely(branches)
            selection = SelectionLoss(step=torch.tensor(3)) if branches is None else None
            losses.append(each(tokens, targets=tokens, selection=selection))
        assert_close(*losses)
    assert graphs.frame_count == 2
