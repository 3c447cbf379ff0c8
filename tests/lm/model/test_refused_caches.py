"""Caches that do not fit a model or a layer raise errors that name them, and their state is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flexnsa import NSACache
from flexnsa.cache.rows import RowCache
from flexnsa.cache.steps import ReadCounter
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.model.decoder import DecoderLayer
from tests.lm.model.sessions import prompts
from tests.support.inputs import SMALL

CONFIG = DecoderConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=12, nsa=SMALL)
KINDS = ["nsa", "dense"]
FILLED = {"empty": 0, "filled": 11}
IDS = torch.zeros(1, 12, dtype=torch.int64)


def make_model(attention: str, **changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    return DecoderLM(replace(CONFIG, attention=attention, **changes)).requires_grad_(False)


def attention_of(model: DecoderLM, index: int) -> Any:
    return cast("DecoderLayer", model.layers[index]).attention


def all_state(cache: RowCache) -> dict[str, Any]:
    """Copy all that a cache knows, on the device and on the host, and where its memory lies."""
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(cache).items()}
    own |= {f"room.{name}": value for name, value in vars(cache.room).items()}
    own |= {f"buffers[{name}]": value.clone() for name, value in cache.buffers.items()}
    own["at"] = [value.data_ptr() for value in cache.state().values()]
    own["reads"] = asdict(reads) if (reads := getattr(cache, "reads", None)) is not None else None
    return own | {"is_empty": cache.is_empty}


def assert_same(now: dict[str, Any], before: dict[str, Any]) -> None:
    assert now.keys() == before.keys()
    for name, value in before.items():
        same = torch.equal(now[name], value) if isinstance(value, Tensor) else name == "buffers" or now[name] == value
        assert same, name


def caches_of(model: DecoderLM, filled: int, **options: Any) -> list[Any]:
    caches = model.new_caches(2, 30, **options)
    for cache in caches:
        if isinstance(cache, NSACache):
            cache.reads = ReadCounter()
    if filled:
        model(prompts(2, filled), caches=caches)
    return caches


def another_in_place(change: Callable[[DecoderLM], RowCache]) -> Callable[[list[Any], DecoderLM], list[Any]]:
    """Put another cache in the place of the second layer's: the first layer's own would be taken by then."""
    return lambda caches, model: [caches[0], change(model), *caches[2:]]


def of_another(**changes: Any) -> Callable[[list[Any], DecoderLM], list[Any]]:
    return another_in_place(lambda model: make_model(model.config.attention, **changes).new_caches(2, 30)[1])


OTHER = {"nsa": "dense", "dense": "nsa"}
WRONG: dict[str, tuple[Callable[[list[Any], DecoderLM], Any], str]] = {
    "the first twice": (
        lambda caches, _: [caches[0], *caches[:2]],
        r"caches: expected one of its own .* got caches\[0\]",
    ),
    "the last twice": (lambda caches, _: [*caches[1:], caches[2]], r"caches: .* got caches\[1\] again at 2"),
    "too few": (lambda caches, _: caches[:2], "caches: expected one for each of 3 layers, got 2"),
    "no list": (lambda caches, _: {*caches}, "caches: expected a list of caches"),
    "another rope_base": (of_another(rope_base=1e6), r"caches\[1\]: expected rope_base=10000.0, .* got 1000000.0"),
    "another dtype": (
        another_in_place(lambda model: attention_of(model, 1).new_cache(2, 30, dtype=torch.float64)),
        "caches: expected one dtype, got",
    ),
    "another device": (
        another_in_place(lambda model: attention_of(make_model(model.config.attention).to("meta"), 1).new_cache(2, 30)),
        r"caches\[1\]: expected device=cpu, as the layer has it, got meta",
    ),
    "less room": (
        another_in_place(lambda model: attention_of(model, 1).new_cache(2, 3)),
        "x: expected at most 3 tokens, for which the cache of 3 has room in row 0, got 12",
    ),
    "other rows": (
        another_in_place(lambda model: attention_of(model, 1).new_cache(3, 30)),
        r"caches: expected 2 rows, got \[2, 3, 2\]",
    ),
    "other tokens": (
        another_in_place(lambda model: caches_of(model, 7)[1]),
        r"caches: expected tokens of the same lengths in all, got \[(0|11), (0|11)\] in caches\[0\] and \[7, 7\] in "
        r"caches\[1\]",
    ),
    "of the other attention": (
        another_in_place(lambda model: make_model(OTHER[model.config.attention]).new_caches(2, 30)[1]),
        r"caches\[1\]: expected (NSACache|DenseCache), got",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("filled", FILLED)
@pytest.mark.parametrize("attention", KINDS)
def test_caches_that_do_not_fit_are_named_and_are_as_they_were(attention: str, filled: str, name: str) -> None:
    model = make_model(attention)
    caches = caches_of(model, FILLED[filled])
    change, message = WRONG[name]
    given = change(caches, model)
    every = [*caches, *(cache for cache in given if cache not in caches and cache.device.type != "meta")]
    before = [all_state(cache) for cache in every]
    for call in (model, model.last_logits):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            call(prompts(2, 12), caches=given)
    for cache, was in zip(every, before, strict=True):
        assert_same(all_state(cache), was)


def layer_calls(layer: Any, filled: int) -> dict[str, tuple[Callable[[RowCache], object], str]]:
    """Wrong calls of one layer, at any stage; the cache has two sequences of 30 tokens."""
    x, short = torch.randn(2, 12, 32), torch.randn(2, 3, 32)
    trained = nn.Parameter(torch.ones(()))
    calls: dict[str, tuple[Callable[[RowCache], object], str]] = {
        "too many": (lambda cache: layer(torch.randn(2, 31, 32), cache=cache), "x: expected at most"),
        "too many for a row": (
            lambda cache: layer(torch.randn(2, 31 - filled, 32), cache=cache, lengths=torch.tensor([1, 31 - filled])),
            "x: expected at most",
        ),
        "lengths": (lambda cache: layer(x, cache=cache, lengths=torch.tensor([13, 1])), "lengths: expected 0 .. 12"),
        "rows": (lambda cache: layer(x[:1], cache=cache), "cache: expected batch_size=1, as the layer has it, got 2"),
        "gradients": (lambda cache: layer(x * trained, cache=cache), "cache: expected torch.no_grad"),
        "dtype": (lambda cache: layer.double()(x.double(), cache=cache), "cache: expected dtype=torch.float64"),
        "dtype, a step": (lambda cache: layer.double()(short.double(), cache=cache), "cache: expected dtype=torch.f"),
        "documents": (
            lambda cache: layer(x[:1], cache=cache, document_ids=IDS),
            "document_ids: expected (None with a cache that is not|2 documents)",
        ),
        "too long a document": (
            lambda cache: layer(torch.randn(1, 33, 32), cache=cache, document_ids=torch.tensor([[0] * 2 + [1] * 31])),
            "(document_ids: expected None with a cache|x: expected at most 30 tokens)",
        ),
    }
    for name in ("w_k", "w_v") if hasattr(layer, "w_k") else ("w_k_slc", "w_v_win", "w_v_cmp"):
        for what, given in (("", x), (", a step", short)):
            calls[f"dtype of {name}{what}"] = (
                lambda cache, name=name, given=given: with_other_dtype(layer, name)(given, cache=cache),
                "cache: expected dtype=torch.float64",
            )
    return calls


def with_other_dtype(layer: Any, name: str) -> Any:
    """Have one of the projections return another dtype."""
    layer.get_submodule(name).register_forward_hook(lambda _module, _inputs, out: out.double())
    return layer


CALLS = {kind: list(layer_calls(attention_of(make_model(kind), 0), 0)) for kind in KINDS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in CALLS[kind]])
@pytest.mark.parametrize("filled", FILLED)
def test_a_refused_call_leaves_all_of_the_state_as_it_was(kind: str, filled: str, name: str) -> None:
    layer = attention_of(make_model(kind), 0)
    cache = layer.new_cache(2, 30)
    if kind == "nsa":
        cache.reads = ReadCounter()
    if FILLED[filled]:
        layer(torch.randn(2, FILLED[filled], 32), cache=cache)
    call, message = layer_calls(layer, FILLED[filled])[name]
    before = all_state(cache)
    with pytest.raises(ValueError, match=f"^{message}"):
        call(cache)
    assert_same(all_state(cache), before)
    assert cache.is_empty == (FILLED[filled] == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_which_any_parameter_learns_is_refused_with_a_cache(kind: str) -> None:
    layer = attention_of(make_model(kind), 0)
    for parameter in layer.parameters():
        parameter.requires_grad_(True)
        with pytest.raises(ValueError, match=r"^cache: expected torch.no_grad\(\)"):
            layer(torch.randn(2, 12, 32), cache=layer.new_cache(2, 30))
        parameter.requires_grad_(False)
    layer(torch.randn(2, 12, 32), cache=layer.new_cache(2, 30))


@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_a_hook_ends_half_way_leaves_an_empty_cache_empty(kind: str, length: int) -> None:
    layer = attention_of(make_model(kind), 0)
    cache, x = layer.new_cache(2, 30), torch.randn(2, length, 32)

    def stop(*_: object) -> None:
        raise RuntimeError("stopped")

    hook = layer.get_submodule("w_v" if kind == "dense" else "phi_k").register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="stopped"):
        layer(x.repeat(1, 1 + 8 // length, 1), cache=cache)
    hook.remove()
    assert cache.is_empty
    assert not cache.lengths.any()
    torch.testing.assert_close(layer(x, cache=cache), layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained", [0, 1, "embeddings"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_with_caches_is_refused_before_the_first_layer(kind: str, trained: int | str) -> None:
    model, x = make_model(kind), prompts(2, 12)
    if isinstance(trained, int):
        attention_of(model, trained).requires_grad_(True)
    else:
        x = model.embedding(x).requires_grad_()
    caches = caches_of(model, 0)
    before = [all_state(cache) for cache in caches]
    with pytest.raises(ValueError, match=r"^caches: expected torch.no_grad\(\)"):
        model(x, caches=caches)
    for cache, was in zip(caches, before, strict=True):
        assert_same(all_state(cache), was)
