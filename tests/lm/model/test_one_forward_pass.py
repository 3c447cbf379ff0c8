"""What a decoder does once a forward pass, however many layers it has and whichever of them run again in backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import noop_context_fn

from flexnsa import mods
from flexnsa.attention.dispatch import IMPLEMENTATIONS, SDPA
from flexnsa.attention.interface import BranchOutput, Call
from flexnsa.functional import calls as functional_calls
from flexnsa.layers import layouts
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.dense import attention as dense
from flexnsa.lm.model import decoder
from tests.support.inputs import SMALL

LAYERS = 3
CONFIG = DecoderConfig(dim=32, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8, impl="sdpa", nsa=SMALL)
MODS: dict[str, dict[str, Any]] = {"no mod": {}, "score_mod": {"score_mod": mods.soft_cap(2.0)}}


def train(checkpointing: bool | tuple[int, int], **options: Any) -> None:
    """One forward and backward pass; ten blocks to a query at the end, of which it takes four."""
    model = DecoderLM(replace(CONFIG, checkpointing=checkpointing))
    model(torch.randint(256, (2, 150)), **options).square().sum().backward()


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Mock:
    """Have a function of a module count its calls."""
    function = Mock(wraps=getattr(module, name))
    monkeypatch.setattr(module, name, function)
    return function


def select_at_random(q: Tensor, k_cmp: Tensor, call: Call, lse: Tensor | None, importance: Tensor | None) -> Tensor:  # noqa: ARG001
    """Choose the blocks that other queries would, new ones with every call."""
    return SDPA.select(torch.randn_like(q), k_cmp, call, None, None)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The blocks that each run of a layer attends to, of a selection that never repeats itself."""
    blocks: list[Tensor] = []

    def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
        blocks.append(block_indices)
        return SDPA.selected(q, k, v, block_indices, call)

    monkeypatch.setitem(IMPLEMENTATIONS, "sdpa", replace(SDPA, select=select_at_random, selected=selected))
    return blocks


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", MODS)
def test_a_layer_runs_again_with_the_blocks_that_it_selected_if_they_are_kept(
    name: str, kept: bool, used: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(decoder, "keep_selection", noop_context_fn)
    train(True, **MODS[name])
    pairs = zip(used[:LAYERS], reversed(used[LAYERS:]), strict=True)
    assert [torch.equal(first, again) for first, again in pairs] == [kept] * LAYERS


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_where_tokens_stand_is_found_out_once(
    packed: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = counted(monkeypatch, layouts, "document_positions")
    tables = counted(monkeypatch, layouts, "stored_rope_tables")
    ids = torch.arange(3).repeat_interleave(torch.tensor([20, 90, 40])).expand(2, -1)
    train(checkpointing, document_ids=ids if packed else None)
    assert documents.call_count == packed
    assert tables.call_count == 2  # of tokens and of compressed tokens


def test_where_tokens_of_the_dense_twin_stand_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = (counted(monkeypatch, module, "document_positions") for module in (dense, functional_calls))
    model = DecoderLM(replace(CONFIG, attention="dense"))
    model(torch.randint(256, (2, 150)), document_ids=torch.arange(150).expand(2, -1) // 40)
    assert here.call_count == 1
    assert not elsewhere.called
