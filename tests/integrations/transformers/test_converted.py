"""Converted models and the library's own decoder: where they begin, and what their caches can do."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, GenerationMixin

from flexnsa import NSAConfig
from flexnsa.config import BRANCHES
from flexnsa.functional.indices import record_indices, replay_indices
from flexnsa.layers.compression import average_blocks
from flexnsa.layers.forward import SparseLayer
from flexnsa.transformers import FlexNSACache, convert, recall, to_dense
from tests.integrations.transformers.families import (
    ALL,
    FAMILIES,
    FEW,
    INDEX,
    INDEXED,
    ROPES,
    alive,
    converted,
    dense,
    in_steps,
    pad_left,
    tokens,
)
from tests.integrations.transformers.test_one_model import EVERY_KIND, GREEDY, gradients

MODELS = {name: make for name, make in EVERY_KIND.items() if "drop-in" not in name}


@pytest.fixture(scope="module", params=MODELS)
def few(request: pytest.FixtureRequest) -> Any:
    """A model that leaves most keys out."""
    return MODELS[request.param]()


@pytest.mark.parametrize("index", [{}, INDEX], ids=["means", "indexer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_selected_branch_alone_is_the_dense_model_and_becomes_it_again(family: str, index: dict[str, Any]) -> None:
    model, x, padded = dense(family), tokens(2, 70), pad_left([tokens(50), tokens(31)])
    same = convert(model, NSAConfig(**ALL | index), branches=["slc"])
    again = to_dense(same)
    assert type(again) is type(model)
    want = model(x, labels=x)
    want.loss.backward()
    generated = model.generate(**padded, **GREEDY)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for other in (same, again):
        got = other(x, labels=x)
        got.loss.backward()
        assert_close(got.logits, want.logits)
        grads = {name: x.grad for name, x in other.named_parameters() if ".indexer." not in name}
        assert_close({name.replace("_proj_slc", "_proj"): x for name, x in grads.items()}, gradients)
        assert torch.equal(other.generate(**padded, **GREEDY), generated)


def test_in_a_dense_stage_the_selected_branch_alone_is_the_dense_model() -> None:
    model, x = dense("llama"), tokens(2, 70)
    one, three = convert(model, NSAConfig(**FEW), branches=["slc"]), convert(model, NSAConfig(**FEW))
    before, layers = three(x).logits, [x for x in (*one.modules(), *three.modules()) if isinstance(x, SparseLayer)]
    assert not torch.allclose(one(x).logits, model(x).logits)  # which leaves most keys out
    for layer in layers:
        layer.attend_densely()
    assert_close(one(x).logits, model(x).logits)
    projected = [
        x.register_forward_pre_hook(lambda *_: pytest.fail("the window is projected"))
        for name, x in three.named_modules()
        if name.endswith("_proj_win")
    ]
    three(x, labels=x).loss.backward()
    learn = {name for name, parameter in three.named_parameters() if "_proj_" in name and parameter.grad is not None}
    assert learn == {name for name, _ in three.named_parameters() if "_proj_slc" in name}
    for hook in projected:
        hook.remove()
    for layer in layers:
        layer.attend_densely(None)
    assert torch.equal(three(x).logits, before)


def test_it_is_a_copy_that_goes_on_as_the_dense_model_was() -> None:
    model = dense("llama", tie_word_embeddings=True).train()
    model.generation_config.top_k = 7
    copy = convert(model, NSAConfig(**ALL), branches=["slc"])
    again = to_dense(copy.eval())
    assert (model.training, copy.training, again.training) == (True, False, False)
    assert convert(model, NSAConfig()).training
    assert GenerationMixin in type(copy).__bases__  # by which transformers' own tests tell models that generate
    for one in (copy, again):
        assert one.generation_config.top_k == 7
        assert one.lm_head.weight is one.model.embed_tokens.weight
        assert not _memory(one) & _memory(model)


def test_what_is_frozen_stays_frozen() -> None:
    model = dense("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].self_attn.k_proj.requires_grad_(False)
    keys = {f"model.layers.0.self_attn.k_proj_{tag}.{kind}" for tag in BRANCHES for kind in ("weight", "bias")}
    assert _frozen(convert(model, NSAConfig(**ALL))) == {"model.embed_tokens.weight", *keys}
    assert _frozen(to_dense(convert(model, NSAConfig(**ALL), branches=["slc"]))) == _frozen(model)


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES)
def test_positions_are_turned_as_in_the_dense_model(rope: str) -> None:
    """In whole rows and in steps; with all three branches, compressed keys too are turned by the same angles."""
    limit = {"max_position_embeddings": 40} if rope == "dynamic" else {}
    model = dense("llama", rope_parameters=ROPES[rope], **limit)
    x = tokens(1, 70)
    same = convert(model, NSAConfig(**ALL), branches=["slc"])
    assert_close(same(x, use_cache=False).logits, model(x).logits)
    assert torch.equal(same.generate(x[:, :30], **GREEDY), model.generate(x[:, :30], **GREEDY))
    if rope not in ("dynamic", "longrope"):  # these turn tokens by how many there are
        three = alive(convert(model, NSAConfig(**FEW | INDEX)))
        assert_close(in_steps(three, x, 29, 41), three(x, use_cache=False).logits)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_looking_at_a_model_changes_nothing_in_it(rope: str) -> None:
    """Neither angles for the tokens of the look, nor what is frozen in evaluation, nor the state of random draws."""
    model, x = dense("llama", rope_parameters=ROPES[rope], max_position_embeddings=32).train(), tokens(1, 60)
    model.model.layers[0].self_attn.q_proj.eval()
    want, draws = deepcopy(model)(x).logits, torch.get_rng_state()
    before = {name: _settings(module) for name, module in model.named_modules()}
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="attention_dropout") as refusal:
        convert(model, NSAConfig(**ALL), branches=["slc"])
    assert "0.5" in str(refusal.value)  # while the error is held, with all frames that it came through
    model.model.layers[1].self_attn.attention_dropout = 0.0
    assert {name: _settings(module) for name, module in model.named_modules()} == before
    same = convert(model, NSAConfig(**ALL), branches=["slc"], copy=False)
    assert torch.equal(torch.get_rng_state(), draws)
    modes = {name.replace("_proj_slc", "_proj"): module.training for name, module in same.named_modules()}
    assert {name: modes[name] for name in before} == {name: values["training"] for name, values in before.items()}
    assert_close(same(x).logits, want)
    back = to_dense(same)
    assert {name: module.training for name, module in back.named_modules()} == {name: modes[name] for name in before}


@torch.no_grad()
def test_it_begins_with_the_selected_branch_and_a_fiftieth_of_the_others() -> None:
    model, x = dense("llama"), tokens(1, 60)
    start = convert(model, NSAConfig(**ALL))
    layer = start.model.layers[0].self_attn
    hidden = torch.randn(1, 30, 48, dtype=torch.float64)
    gates = 2 * layer.gate(hidden).sigmoid().unflatten(-1, (6, 3))
    assert_close(gates, torch.tensor([0.02, 1.0, 0.02], dtype=torch.float64).expand_as(gates), atol=1e-6, rtol=0)
    keys = torch.randn(1, 2, 30, 16, dtype=torch.float64)
    assert_close(layer.compress_k(keys), average_blocks(keys, None, NSAConfig(**ALL)), atol=1e-6, rtol=0)
    want, got = model(x).logits, start(x).logits
    assert 1e-4 < (got - want).abs().mean() < 0.1 * want.abs().mean()
    start.config.flexnsa["opening"] = 0.0
    assert_close(start(x).logits, want)
    assert not layer.project(hidden).signed
    start.config.flexnsa["opening"] = -0.5  # kernels that put gates into probabilities cannot take it
    start(x)
    assert layer.project(hidden).signed


@torch.no_grad()
def test_layers_attend_to_the_blocks_of_the_layer_whose_index_they_read(tmp_path: Path) -> None:
    """Of four layers 0, 2 and 3 are converted: 2 reads the index of 0."""
    full, sliding, x = "full_attention", {"use_sliding_window": True, "sliding_window": 16}, tokens(2, 70)
    layers = {"num_hidden_layers": 4, "layer_types": [full, "sliding_attention", full, full], **sliding}
    shared, apart = (converted("qwen3", INDEXED | share, **layers) for share in ({"share_index": [0, 0, 2]}, {}))
    assert len(apart.load_state_dict(shared.state_dict(), strict=False).missing_keys) == 6
    with record_indices(shared) as handle:
        out = shared(x, use_cache=True)
    first, last = handle.indices()
    with replay_indices(apart, [first, first, last]):
        assert_close(apart(x, use_cache=False).logits, out.logits)
        assert_close(recall(apart, x), recall(shared, x))
    assert not torch.allclose(apart(x).logits, out.logits)
    assert ["k_index" in cache.buffers for cache in out.past_key_values.kept] == [True, False, True]
    shared.save_pretrained(tmp_path)
    assert_close(type(shared).from_pretrained(tmp_path)(x).logits, out.logits)


@torch.no_grad()
def test_a_cache_forgets_selects_and_repeats_rows(few: Any) -> None:
    x, more = tokens(3, 40), torch.full((3, 1), 7)
    cache: Any = FlexNSACache(few.config, max_rewind=8)
    want = few(torch.cat((x, more), 1), use_cache=False).logits[:, -1:]
    few(x, past_key_values=cache)
    few(more + 1, past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 40
    assert_close(few(more, past_key_values=cache).logits, want)
    with pytest.raises(ValueError, match="tokens_to_remove: expected 0 or a negative number, got 40"):
        cache.crop(40)
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].batch_size == 4
    assert_close(few(more[:1].expand(4, -1), past_key_values=cache).logits, want[[2, 2, 0, 0]])
    cache.reset()
    assert_close(few(x[[1]].expand(4, -1), past_key_values=cache).logits, few(x[[1]]).logits.expand(4, -1, -1))
    with pytest.raises(ValueError, match=r"(cache|past_key_values): expected a cache of 3 rows, got 4"):
        few(x, past_key_values=cache)


@torch.no_grad()
def test_drafts_are_taken_back(few: Any) -> None:
    x = tokens(1, 10).repeat(1, 5)
    want = few.generate(x, **GREEDY)
    assert torch.equal(few.generate(x, **GREEDY, prompt_lookup_num_tokens=4), want)
    assert torch.equal(few.generate(x, **GREEDY, assistant_model=converted("qwen3", FEW | {"window_size": 3})), want)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["three branches", "own decoder"])
def test_many_drafts_that_are_wrong_at_once_are_taken_back(kind: str) -> None:
    few, many, greedy = MODELS[kind](), tokens(1, 75).repeat(1, 2), GREEDY | {"max_new_tokens": 72}
    want = few.generate(many, **greedy)
    assert torch.equal(few.generate(many, **greedy, prompt_lookup_num_tokens=70)[:, : want.shape[1]], want)
    cache: Any = FlexNSACache(few.config)
    for layer in cache.layers:
        layer.activate_past_recording()  # as generate does with a cache that it is given
    few(many, past_key_values=cache)
    cache.crop(-64)
    assert_close(few(many[:, 86:87], past_key_values=cache).logits[:, -1], few(many[:, :87]).logits[:, -1])


@pytest.mark.parametrize(
    ("changes", "backend"),
    [({"branches": ["cmp", "slc"]}, "inductor"), (INDEXED | {"share_index": 2}, "aot_eager")],
)
def test_compiled_as_one_graph_it_has_the_same_gradients(changes: dict[str, Any], backend: str) -> None:
    """The window is compiled as the selected branch is, and an indexer by Inductor in tests of layers."""
    few = converted("llama", FEW | changes, num_hidden_layers=changes.get("share_index", 1)).train()
    x = tokens(2, 40)
    want = gradients(few, few, x)
    got = gradients(few, torch.compile(few, fullgraph=True, backend=backend), x)
    in_single = deepcopy(few).float()
    single = gradients(in_single, in_single, x)
    # Llama normalizes and rotates in float32 whatever its weights are, and compiled code rounds otherwise
    for one, plain, rounded in zip(got, want, single, strict=True):
        assert_close(one, plain, rtol=0, atol=2 * (rounded - plain).abs().max().item())


def test_what_a_cache_cannot_do_is_refused(few: Any) -> None:
    x = tokens(1, 20)
    with pytest.raises(ValueError, match=r"(cache|past_key_values): expected torch.no_grad\(\)"):
        few(x, past_key_values=FlexNSACache(few.config))
    assert few(x).past_key_values is None
    with torch.no_grad():
        assert isinstance(few(x).past_key_values, FlexNSACache)
        with pytest.raises(TypeError, match=r"(cache|past_key_values): expected a FlexNSACache, got"):
            few(x, past_key_values=DynamicCache(config=few.config))
        with pytest.raises(TypeError, match=r"(cache|past_key_values): expected Cache, got 'a'"):
            few(x, past_key_values="a")
        with pytest.raises(ValueError, match="cache_implementation: expected None for NSA layers, got 'quantized'"):
            few.generate(x, **GREEDY, cache_implementation="quantized")


SHARED = INDEXED | {"share_index": 2}
REFUSED: dict[str, Any] = {
    "sliding_window: expected None of a model to convert, got 16": lambda: change(dense("mistral", sliding_window=16)),
    "attention_dropout: expected 0.0 of a model to conv": lambda: change(dense("llama", attention_dropout=0.1)),
    "model: expected a dense one, got a FlexNSAQwen3ForCausalLM": lambda: change(converted("qwen3", FEW)),
    "model: expected a converted one, got a LlamaForCausalLM": lambda: to_dense(dense("llama")),
    "share_index: expected a number for each of 2 ": lambda: converted("llama", INDEXED | {"share_index": [0] * 3}),
    "share_index: expected 1 without an indexer": lambda: converted("llama", FEW | {"share_index": 2}),
    "share_index: expected an int, got 2.0": lambda: converted("llama", INDEXED | {"share_index": 2.0}),
    "^index: expected": lambda: converted("llama", SHARED).model.layers[1].self_attn(torch.eye(48).double()[None]),
    "copy: expected": lambda: convert(dense("llama"), NSAConfig(), copy="no"),  # pyright: ignore[reportArgumentType]
    r"branches: expected \('slc',\) of a model to make dense": lambda: to_dense(change(dense("llama"))),
}


def change(model: Any) -> Any:
    return convert(model, NSAConfig())


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_be_neither_converted_nor_made_dense_is_refused(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message]()


def _settings(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not isinstance(value, dict)}


def _memory(model: Any) -> set[int]:
    return {x.data_ptr() for x in (*model.parameters(), *model.buffers())}


def _frozen(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
