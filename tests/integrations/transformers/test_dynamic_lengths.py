"""Models of transformers as exported programs and compiled graphs: one for every length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.transformers.families import FEW, INDEXED, converted, own, sparse, tokens
from tests.support.exported import assert_few_graphs_serve_all, assert_one_program_serves_all

MODELS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW, num_hidden_layers=1),
    "converted": lambda: converted("llama", FEW, num_hidden_layers=1),
    "indexer": lambda: converted("qwen3", INDEXED, num_hidden_layers=1),
    "own decoder": lambda: own(num_layers=1),
}


def _inputs(*shape: int) -> dict[str, Any]:
    return {"input_ids": tokens(*shape)}


@pytest.mark.parametrize(
    ("name", "any_batch"), [("drop-in", True), ("converted", False), ("indexer", True), ("own decoder", False)]
)
def test_one_program_serves_every_length(name: str, any_batch: bool) -> None:
    model = MODELS[name]()
    model.config.use_cache = False
    assert_one_program_serves_all(model, _inputs, any_batch=any_batch)


@pytest.mark.filterwarnings("ignore:selection")
@pytest.mark.parametrize(
    ("name", "how", "backend"),
    [("drop-in", "marked", "aot_eager"), ("indexer", "marked", "eager"), ("own decoder", "automatic", "eager")],
)
def test_few_graphs_serve_every_length(name: str, how: str, backend: str) -> None:
    """The tracer alone decides how many; gradients of other models are compiled in tests of their own."""
    model = MODELS[name]().train()
    model.config.use_cache = False
    assert_few_graphs_serve_all(model, _inputs, how, backend=backend)


def test_few_graphs_serve_the_middle_of_a_schedule() -> None:
    """One more graph, as the first call changes the options of the layers."""
    model = MODELS["converted"]().train()
    model.config.use_cache = False
    model.config.flexnsa = {**model.config.flexnsa, "opening": 0.5}
    assert_few_graphs_serve_all(model, _inputs, "automatic", backend="eager", more=1)
