"""Prompts, and rows that change, on the pretended GPU: a fake tensor has no value, so whoever asks for one fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS, IMPLEMENTATIONS
from flexnsa.attention.interface import BranchOutput, Call, Compressed
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.dense import attention as dense_attention
from tests.support.inputs import SMALL


def attended(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> BranchOutput:  # noqa: ARG001
    return BranchOutput(q.new_empty(*q.shape[:3], v.shape[3]), None)


def select(q: Tensor, k_cmp: Tensor, call: Call, *_: object) -> Tensor:
    shape = *k_cmp.shape[:2], q.shape[2], call.config.num_selected_blocks
    return q.new_empty(shape, dtype=torch.int32)


SHAPES = replace(
    IMPLEMENTATIONS["reference"],
    compressed=lambda *x: Compressed(*attended(*x)),
    select=select,
    selected=attended,
    window=attended,
)
"""Shapes of what is computed: of the kernels other tests tell what they do."""


def fake_model(**options: Any) -> DecoderLM:
    """A model without values on the pretended GPU."""
    with torch.device("meta"):
        model = DecoderLM(DecoderConfig(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, **options))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, device="cuda"), requires_grad=False))
    return model


def tokens(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_prompts_and_rows_that_change_wait_for_nothing(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (IMPLEMENTATIONS, CACHED_IMPLEMENTATIONS):
        monkeypatch.setitem(table, "triton", SHAPES)
    monkeypatch.setattr(dense_attention, "compile_once", lambda function: function)
    with FakeTensorMode(), torch.no_grad():
        model = fake_model(attention=attention, nsa=SMALL)
        packed, served = model.new_caches(3, 40), model.new_caches(5, 90)
        lengths = torch.zeros(5, dtype=torch.int32, device="cuda")
        model(tokens(1, 60), document_ids=tokens(1, 60), caches=packed)
        model(tokens(5, 60), caches=served, lengths=lengths)
        for cache, other in zip(served, packed, strict=True):
            cache.insert([0, 3, 4], other)  # pyright: ignore[reportArgumentType]
            cache.insert(tokens(2), other, 2)  # pyright: ignore[reportArgumentType]
            cache.reset([1, 2])
            cache.reset(tokens(5).bool())
            cache.grow(100)
        for _ in range(3):
            model(tokens(5, 1), caches=served, lengths=lengths)
        with pytest.raises(DataDependentOutputException):  # a full row is the host's to tell
            model(tokens(5, 120), caches=served, lengths=lengths)
