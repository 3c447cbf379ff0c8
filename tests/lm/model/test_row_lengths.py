"""Impossible lengths raise errors that name them everywhere, and caches are unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexnsa
from flexnsa import NativeSparseAttention, NSACache
from flexnsa import lm as models
from flexnsa.lm.dense.attention import DenseAttention
from flexnsa.lm.dense.cache import DenseCache
from tests.lm.model.sessions import make_model, prompts

ROWS, TOKENS = 3, 17
TAKERS: list[Any] = [NativeSparseAttention, NSACache, DenseAttention, DenseCache]
"""Further classes, outside :mod:`flexnsa.lm`, whose methods take lengths."""


class Case(NamedTuple):
    """A call that takes ``lengths``, and the least that they may be."""

    call: Callable[[Any, Any], object]
    least: int
    kind: str = "nsa"


def of_layer(given: Given, lengths: Any) -> object:
    return given.layer(given.x, cache=given.cache, lengths=lengths)


class Given:
    """A small model of one kind of attention, a layer, and caches that are empty."""

    def __init__(self, kind: str) -> None:
        self.model = make_model(kind)
        self.layer: Any = self.model.layers[0].attention
        self.x = torch.randn(ROWS, TOKENS, 32)
        self.caches = self.model.new_caches(ROWS, 40)
        self.cache: Any = self.caches[0]
        self.session = models.DecodingSession(self.model, ROWS, 40)

    def keys(self) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, 2, TOKENS, 8), torch.randn(ROWS, 2, TOKENS, 6)


CASES: dict[str, Case] = {
    "NativeSparseAttention.forward": Case(of_layer, 0),
    "NativeSparseAttention.step_inputs": Case(
        lambda given, lengths: given.layer.step_inputs(given.x[:, :TOKENS], given.cache, lengths), 0
    ),
    "NSACache.begin": Case(lambda given, lengths: given.cache.begin(TOKENS, lengths), 0),
    "NSACache.begin_rows": Case(lambda given, lengths: given.cache.begin_rows(TOKENS, lengths, None, None), 0),
    "NSACache.check_room": Case(lambda given, lengths: given.cache.check_room(TOKENS, lengths), 0),
    "NSACache.crop": Case(lambda given, lengths: given.cache.crop(lengths), 0),
    "DenseAttention.forward": Case(of_layer, 0, "dense"),
    "DenseCache.append": Case(lambda given, lengths: given.cache.append(*given.keys(), lengths), 0, "dense"),
    "DenseCache.begin": Case(lambda given, lengths: given.cache.begin(TOKENS, lengths), 0, "dense"),
    "DenseCache.begin_rows": Case(
        lambda given, lengths: given.cache.begin_rows(TOKENS, lengths, None, None), 0, "dense"
    ),
    "DenseCache.check_room": Case(lambda given, lengths: given.cache.check_room(TOKENS, lengths), 0, "dense"),
    "DecoderLM.forward": Case(lambda given, lengths: given.model(prompts(), caches=given.caches, lengths=lengths), 0),
    "DecoderLM.last_logits": Case(lambda given, lengths: given.model.last_logits(prompts(), lengths=lengths), 1),
    "DecodingSession.generate": Case(lambda given, lengths: given.session.generate(prompts(), 2, lengths=lengths), 1),
    "DecodingSession.prefill": Case(lambda given, lengths: given.session.prefill(prompts(), lengths), 1),
    "generate_tokens": Case(
        lambda given, lengths: models.generate_tokens(given.model, prompts(), 2, lengths=lengths), 1
    ),
}
OTHERS: dict[str, Case] = {
    "with caches": Case(
        lambda given, lengths: given.model.last_logits(prompts(), caches=given.caches, lengths=lengths), 1
    ),
    "dense, with caches": Case(
        lambda given, lengths: given.model.last_logits(prompts(), caches=given.caches, lengths=lengths), 1, "dense"
    ),
    "dense": Case(lambda given, lengths: given.model(prompts(), caches=given.caches, lengths=lengths), 0, "dense"),
    "by the model": Case(lambda given, lengths: given.model.generate(prompts(), 2, lengths=lengths), 1),
    "without a cache": Case(
        lambda given, lengths: given.model.generate(prompts(), 2, lengths=lengths, cached=False), 1
    ),
    "by a step": Case(lambda given, lengths: given.layer(given.x[:, :1], cache=given.cache, lengths=lengths), 0),
}


def wrong_lengths(least: int) -> list[Tensor]:
    """Out of range in one row, of another number of rows, and no whole numbers."""
    ends = ([least - 1, 2, 3], [1, 1, 41], [1, 2**32 + 1, 1], [-(2**31) - 1, 1, 1])
    return [*map(torch.tensor, ends), torch.tensor([1, 1]), torch.tensor([[1], [1], [1]]), torch.ones(3)]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES | OTHERS)
def test_lengths_that_cannot_be_are_named_and_caches_stay(name: str) -> None:
    case = (CASES | OTHERS)[name]
    given = Given(case.kind)
    for lengths in wrong_lengths(case.least):
        with pytest.raises(ValueError, match=r"^lengths: expected .*, got "):
            case.call(given, lengths)
        for cache in given.caches:
            assert not any(tensor.any() for tensor in cache.state().values()), lengths
    with pytest.raises(TypeError, match=r"^lengths: expected "):
        case.call(given, [1.5, 1, 1])


@torch.no_grad()
def test_the_range_of_what_is_real_is_told() -> None:
    with pytest.raises(ValueError, match=r"^lengths: expected 1 \.\. 17, the tokens of x, got \[0, 1, 3\]"):
        make_model().last_logits(prompts(), lengths=torch.tensor([0, 1, 3]))


def test_every_public_call_that_takes_lengths_is_looked_at() -> None:
    public = [getattr(module, name) for module in (flexnsa, models) for name in module.__all__]
    found: set[str] = set()
    for taker in [*public, *TAKERS]:
        methods = inspect.getmembers(taker, inspect.isfunction) if inspect.isclass(taker) else []
        named = [(f"{taker.__name__}.{name}", function) for name, function in methods if name[0] != "_"]
        for name, function in [*named, *([(taker.__name__, taker)] if inspect.isfunction(taker) else [])]:
            if {"lengths", "counts"} & {*inspect.signature(function).parameters}:
                found.add(name)
    assert found == {*CASES}
