"""Drop-in, converted and own models are each one model, however they are called, exported, compiled, or rounded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import StaticCache

from flexnsa import NSAConfig, SelectionLoss
from flexnsa.operators.checkpointing import keep_selection
from flexnsa.optim import index_parameters
from flexnsa.transformers import FlexNSACache, convert
from tests.integrations.transformers.families import (
    ALL,
    FEW,
    INDEXED,
    converted,
    dense,
    in_steps,
    own,
    pad_left,
    sparse,
    tokens,
)
from tests.support.comparison import assert_as_exact_as_plain
from tests.support.exported import assert_few_graphs_serve_all, assert_one_program_serves_all

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}
THREE = FEW | {"branches": ["cmp", "slc", "win"], "gates": [0.3, 1.0, 0.2]}
EVERY_KIND: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW),
    "drop-in, three branches": lambda: sparse("llama", THREE),
    "three branches": lambda: converted("qwen3", FEW),
    "selected branch": lambda: converted("qwen3", FEW | {"branches": ["slc"]}),
    "indexer": lambda: converted("qwen3", INDEXED),
    "shared index": lambda: converted("qwen3", INDEXED | {"share_index": [0, 1, 0]}, num_hidden_layers=3),
    "own decoder": own,
}


@pytest.fixture(scope="module", params=EVERY_KIND)
def few(request: pytest.FixtureRequest) -> Any:
    """A model that leaves most keys out."""
    return EVERY_KIND[request.param]()


@torch.no_grad()
def test_steps_on_a_cache_see_what_whole_rows_see(few: Any) -> None:
    x = tokens(2, 64)
    want = few(x, use_cache=False).logits
    is_drop_in = few.config._attn_implementation == "flexnsa"
    growing = (
        [StaticCache(few.config, max_cache_len=80)] if is_drop_in else [FlexNSACache(few.config, n) for n in (64, 1)]
    )
    for cache in (None, *growing):
        assert_close(in_steps(few, x, 29, 41, cache=cache), want)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_beams", "options"), [(1, [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 8}]), (2, [{}])]
)
def test_rows_of_a_padded_batch_are_continued_as_if_alone(few: Any, num_beams: int, options: list[Any]) -> None:
    rows, greedy = [tokens(50), tokens(33), tokens(4)], GREEDY | {"num_beams": num_beams}
    alone = [few.generate(row[None], **greedy, use_cache=False)[0, len(row) :] for row in rows]
    for each in options:
        batch = few.generate(**pad_left(rows), **greedy, **each, disable_compile=True)
        for want, got in zip(alone, batch, strict=True):
            assert torch.equal(got[50 : 50 + len(want)], want)


@pytest.mark.parametrize("context", [{}, {"context_fn": keep_selection}])
def test_activations_are_computed_again_in_backward_if_asked(few: Any, context: dict[str, Any]) -> None:
    x = tokens(2, 50)
    want = gradients(few, few, x)
    assert all(gradient.abs().max() > 0 for gradient in want)
    few.gradient_checkpointing_enable({"use_reentrant": False, **context})
    assert_close(gradients(few, few, x), want)
    few.gradient_checkpointing_disable()


def gradients(few: Any, model: Any, x: Tensor) -> list[Tensor]:
    """Differentiate as in training: what an indexer learns too."""
    few.zero_grad()
    selection = SelectionLoss(num_queries=20) if index_parameters(few) else None
    model.train()
    loss = model(x, labels=x, use_cache=False, **({} if selection is None else {"selection": selection})).loss
    (loss if selection is None else loss + selection.total).backward()
    few.eval()
    return [parameter.grad for parameter in few.parameters()]


@pytest.mark.parametrize("by", ["dtype", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("way", ["drop-in", "converted"])
def test_it_errs_as_little_as_the_dense_model(way: str, family: str, by: str) -> None:
    plain, x = dense(family), tokens(2, 60)
    model = sparse(family, ALL) if way == "drop-in" else convert(plain, NSAConfig(**ALL), branches=["slc"])
    exact = _run(plain, x)
    plain, model = (one.to(torch.bfloat16 if by == "dtype" else torch.float32) for one in (plain, model))
    with torch.autocast("cpu", torch.bfloat16) if by == "autocast" else contextlib.nullcontext():
        assert_as_exact_as_plain(_run(model, x), _run(plain, x), exact, factor=2)
        generated = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 64)


def _run(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    return {"logits": out.logits.detach(), "embedding": model.get_input_embeddings().weight.grad.clone()}


MODELS: dict[str, Any] = {
    "drop-in": lambda: sparse("llama", FEW, num_hidden_layers=1),
    "converted": lambda: converted("llama", FEW, num_hidden_layers=1),
    "indexer": lambda: converted("qwen3", INDEXED | {"share_index": 2}),
    "own decoder": lambda: own(num_layers=1),
}


def _inputs(*shape: int) -> dict[str, Any]:
    return {"input_ids": tokens(*shape)}


@pytest.mark.parametrize("name", MODELS)
def test_one_program_serves_every_length(name: str) -> None:
    model = MODELS[name]()
    model.config.use_cache = False
    assert_one_program_serves_all(model, _inputs, any_batch=name in ("drop-in", "indexer"))


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
