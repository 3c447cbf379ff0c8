"""Training makes no cache of NSA layers: a config that asks for one is told once, a call that does is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers.utils import logging as transformers_logging

from tests.integrations.transformers.families import ALL, FEW, converted, own, sparse, tokens
from tests.integrations.transformers.train_text import trainer

MODELS: dict[str, Any] = {"converted": lambda: converted("llama", FEW), "own": own}
WARNING = "config.use_cache: expected False in training, because a cache has no gradient, got True"


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @property
    def warnings(self) -> int:
        return sum(text.startswith(WARNING) for text in self.texts)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """What transformers logs, as in a process that has not warned of anything."""
    handler, logger = Kept(), transformers_logging.get_logger()
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def step(model: Any, **options: Any) -> Any:
    x = tokens(2, 40)
    out = model(x, labels=x, **options)
    out.loss.backward()
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_asks_for_a_cache_in_training_is_told_once(name: str, kept: Kept) -> None:
    model = MODELS[name]().train()
    assert model.config.use_cache
    assert step(model).past_key_values is None
    assert kept.warnings == 1
    for _ in range(3):
        step(model)
    step(MODELS[name]().train())
    assert kept.warnings == 1


@pytest.mark.parametrize("make", [lambda: converted("llama", FEW, num_hidden_layers=1), own], ids=MODELS)
def test_a_compiled_model_is_told_too(make: Callable[[], Any], kept: Kept) -> None:
    torch._dynamo.reset()
    model = torch.compile(make().train(), fullgraph=True, backend="eager")
    step(model)
    step(model)
    assert kept.warnings == 1


@torch.no_grad()
def test_layers_that_are_compiled_one_by_one_fill_the_cache() -> None:
    model, x = converted("llama", FEW).eval(), tokens(2, 40)
    expected = model(x).logits
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    begun = model(x[:, :-1], use_cache=True)
    assert_close(model(x[:, -1:], past_key_values=begun.past_key_values).logits, expected[:, -1:])


@pytest.mark.parametrize("name", MODELS)
def test_nobody_else_is_told(name: str, kept: Kept) -> None:
    model = MODELS[name]().train()
    step(model, use_cache=False)
    model.config.use_cache = False
    step(model)
    model.config.use_cache = True
    step(model.eval())
    with torch.no_grad():
        assert model.train()(tokens(2, 40)).past_key_values is not None
        assert model.eval()(tokens(2, 40)).past_key_values is not None
    model.generate(tokens(1, 40), max_new_tokens=2)
    assert kept.warnings == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_asks_for_a_cache_in_training_is_refused(name: str, kept: Kept) -> None:
    with pytest.raises(ValueError, match=r"use_cache: expected torch.no_grad\(\), because a cache has no gradient"):
        step(MODELS[name]().train(), use_cache=True)
    assert kept.warnings == 0


@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize(
    ("mode", "given"), [("train", "embeddings"), ("eval", "embeddings"), ("train", "tokens through a hook")]
)
@pytest.mark.parametrize("name", [*MODELS, "drop-in"])
def test_frozen_weights_pass_a_gradient_to_embeddings(mode: str, name: str, given: str, use_cache: bool | None) -> None:
    """As prompts are tuned, and images projected."""
    model, x = (MODELS | {"drop-in": lambda: sparse("llama", FEW)})[name]().requires_grad_(False), tokens(2, 40)
    model.train(mode == "train")
    embedded = model.get_input_embeddings()(x).requires_grad_()
    wanted = torch.autograd.grad(model.requires_grad_()(inputs_embeds=embedded, labels=x).loss, embedded)
    seen: list[Any] = [embedded]
    batch: dict[str, Any] = {"inputs_embeds": embedded}
    model.requires_grad_(False)
    if given != "embeddings":
        model.enable_input_require_grads()
        model.get_input_embeddings().register_forward_hook(lambda _, __, out: seen.append(out))
        batch = {"input_ids": x}
    if use_cache and name in MODELS:
        with pytest.raises(ValueError, match=r"^use_cache: expected torch.no_grad\(\)"):
            model(**batch, use_cache=use_cache)
        return
    out = model(**batch, labels=x, use_cache=use_cache)
    assert_close(torch.autograd.grad(out.loss, seen[-1]), wanted)
    assert (out.past_key_values is None) == (name in MODELS or use_cache is False)


def test_the_attention_of_other_models_trains_beside_a_cache_and_says_nothing(kept: Kept) -> None:
    model = sparse("llama", ALL).train()
    assert step(model).past_key_values.get_seq_length() == 40
    assert step(model, use_cache=True).past_key_values.get_seq_length() == 40
    assert kept.warnings == 0


@pytest.mark.parametrize(("name", "use_cache"), [("own", True), ("converted", True), ("converted", False)])
def test_trainer_says_it_once_if_it_is_to_ask_for_a_cache(
    name: str, use_cache: bool, kept: Kept, tmp_path: Path
) -> None:
    trainer(name, tmp_path, steps=3, use_cache=use_cache).train()
    assert kept.warnings == use_cache
