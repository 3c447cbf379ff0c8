"""Recorded and replayed blocks: a text is trained on the blocks with which it was drawn, however it was drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from flexnsa import NativeSparseAttention, record_indices, replay_indices
from flexnsa.attention import dispatch
from flexnsa.lm import DecoderLM, DecodingSession, Sampling
from tests.layers.test_shared_index import build, drawn, learn, make
from tests.support.inputs import TINY

CHOOSES = replace(TINY, num_selected_blocks=5)  # 3 are forced
MODELS: dict[str, dict[str, Any]] = {
    "an indexer": {"share_index": 1},
    "a shared index": {},
    "compressed keys": {"share_index": 1, "nsa": CHOOSES},
    "selected keys": {"share_index": 1, "nsa": CHOOSES, "branches": ("slc",)},
}
LENGTHS = torch.tensor([60, 41, 7])
NEW = 30


def choose_otherwise(model: DecoderLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the model other indexers; one without must not choose at all from now on."""
    for indexer in model.indexers():
        for parameter in indexer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    if not model.indexers():
        blind = replace(dispatch.IMPLEMENTATIONS["sdpa"], select=lambda *_: pytest.fail("blocks are chosen"))
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "sdpa", blind)


def roll_out(model: DecoderLM, temperature: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Generate; return each text, the log probabilities with which its new tokens were drawn, and all blocks."""
    prompts, seen = drawn(60, 3), list[Tensor]()
    hook = model.head.register_forward_hook(lambda _module, _inputs, out: seen.append(out.reshape(3, -1)))
    with record_indices(model) as handle:
        options: dict[str, Any] = {"lengths": LENGTHS, "sampling": Sampling(temperature=temperature), "seed": 1}
        new = torch.tensor(model.generate(prompts, NEW, **options))
    hook.remove()
    log_probs = torch.stack(seen, 1).log_softmax(-1).gather(2, new[..., None])[..., 0]
    texts = [torch.cat((prompt[:length], more)) for prompt, length, more in zip(prompts, LENGTHS, new, strict=True)]
    return texts, [*log_probs], handle.indices()


def log_probs_of(logits: Tensor, text: Tensor) -> Tensor:
    """Return those of the new tokens, given the logits ``(S or more, vocab)`` of a text."""
    new = text[-NEW:, None]
    return logits[len(text) - NEW - 1 : len(text) - 1].log_softmax(-1).gather(1, new)[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_log_probabilities_of_the_rollout(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(**MODELS[name])
    texts, expected, indices = roll_out(model, temperature)
    padded, ids = pad_sequence(texts, batch_first=True), torch.arange(3).repeat_interleave(LENGTHS + NEW)[None]
    with record_indices(model) as handle:
        before = model(padded)
    for drawn_with, whole in zip(indices, handle.indices(), strict=True):
        read = (drawn_with >= 0).any(-1)
        assert read.sum(2)[:, 0].tolist() == (LENGTHS + NEW - 1).tolist()  # the last is not read
        assert torch.equal(drawn_with[read], whole[:, :, : read.shape[2]][read])
    choose_otherwise(model, monkeypatch)
    if model.indexers():
        assert not torch.allclose(model(padded), before, atol=1e-3)
    longer = [pad(each, (0, 0, 0, 1), value=-1) for each in indices]  # the last token of the longest text
    packed = [torch.cat([each[b, :, : len(text)] for b, text in enumerate(texts)], 1)[None] for each in longer]
    for replayed in (indices, packed):
        with replay_indices(model, replayed):
            in_one_row = model(torch.cat(texts)[None], document_ids=ids)[0].split((LENGTHS + NEW).tolist())
            each_alone = model(padded) if replayed is indices else in_one_row
        for logits in (each_alone, in_one_row):
            for got, text, want in zip(logits, texts, expected, strict=True):
                assert_close(log_probs_of(got, text), want, rtol=0, atol=1e-5)


def test_a_block_beside_the_recorded_one_is_seen() -> None:
    model = build()
    (text, *_), (expected, *_), indices = roll_out(model, 1.0)
    indices = [each[:1] for each in indices]
    chosen, at = indices[0][0, 0], len(text) - 2
    free = next(i for i in range(1, 4) if chosen[at, i] + 1 < chosen[at, i + 1])
    chosen[at, free] += 1
    with replay_indices(model, indices):
        difference = (log_probs_of(model(text[None])[0], text) - expected).abs()
    assert difference[-1] > 1e-4
    assert difference[:-1].max() < 1e-5


@torch.no_grad()
def test_blocks_stay_with_their_rows_and_rejected_drafts_are_overwritten() -> None:
    model, x = build(), drawn(70)
    caches: Any = [layer.attention.new_cache(2, 80, max_rewind=4) for layer in model.layers]  # pyright: ignore
    others: Any = [layer.attention.new_cache(3, 160, max_rewind=4) for layer in model.layers]  # pyright: ignore
    with record_indices(model) as handle:
        model(x.flip(1), caches=caches)
        for cache in caches:
            cache.reset()
        model(x[:, :40], caches=caches)
        for at in range(40, 60, 2):
            model(255 - x[:, at : at + 4], caches=caches)
            for cache in caches:
                cache.crop(at)
            model(x[:, at : at + 2], caches=caches)
        for cache, other in zip(caches, others, strict=True):
            cache.reorder(torch.tensor([1, 0]))
            cache.grow(90)
            other.insert([2, 0, 1], cache, torch.tensor([1, 1, 0]))
        model(x[[0, 1, 0], 60:], caches=others)
        recorded = handle.indices()
        model(x[[0, 1, 0]])
        whole = handle.indices()
    for one, other in zip(recorded, whole, strict=True):
        assert torch.equal(one[:, :, :70], other)
        assert (one[:, :, 70:] == -1).all()


@torch.no_grad()
def test_packed_prompts_of_a_cache_and_sessions_are_recorded_by_sequence() -> None:
    model, x = build(), drawn(60)
    ids = (torch.arange(100) >= 60).long()[None]
    session = DecodingSession(model, 2, 32, sampling=Sampling(temperature=0))
    with record_indices(model) as handle:
        model(torch.cat((x[0], x[1, :40]))[None], document_ids=ids, caches=model.new_caches(2, 64))
        of_pack = handle.indices()
        for prompts in (x, x[:, :20].flip(0)):
            new = torch.tensor(session.generate(prompts, 5))
        of_session = handle.indices()
        model(x)
        whole = handle.indices()
        model(torch.cat((x[:, :20].flip(0), new), 1))
        text = handle.indices()
    for pack, all_of, later, short in zip(of_pack, whole, of_session, text, strict=True):
        assert torch.equal(pack[0, :, :60], all_of[0])
        assert torch.equal(pack[1, :, :40], all_of[1, :, :40])
        assert (pack[1, :, 40:] == -1).all()
        assert torch.equal(later[:, :, :24], short[:, :, :24])
        assert (later[:, :, 24:] == -1).all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_recorded_choice(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(checkpointing=checkpointing), drawn(70)
    with record_indices(model) as handle:
        *_, expected = learn(model, x)
    with replay_indices(model, handle.indices()):
        *_, same = learn(model, x)
        choose_otherwise(model, monkeypatch)
        *_, found = learn(model, x)
    assert all(torch.equal(grad, expected[name]) for name, grad in same.items())
    assert found.keys() == expected.keys()
    for name, grad in found.items():  # indexers are others, and learn the same shares from other scores
        assert torch.equal(grad, expected[name]) != (".indexer." in name), name


@pytest.mark.parametrize("by_layer", [False, True])
def test_compiled_models_record_replay_and_become_what_they_were(
    by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_layers": 2, "branches": ("slc",)}
    eager, model, x = build(**options), build(**options), drawn(70)
    torch.compiler.reset()
    compiled: Any = model if by_layer else torch.compile(model, fullgraph=True, backend="aot_eager")
    if by_layer:
        model.compile_layers(fullgraph=True, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        with record_indices(eager) as expected, record_indices(model) as handle:
            assert_close(compiled(x), eager(x), rtol=0, atol=1e-5)
    assert all(map(torch.equal, handle.indices(), expected.indices()))
    for each in (model, eager):
        torch.manual_seed(5)
        choose_otherwise(each, monkeypatch)
    with replay_indices(model, handle.indices()), replay_indices(eager, handle.indices()):
        replayed = [each(x) for each in (compiled, eager)]
        for logits in replayed:
            assert_close(logits, before, rtol=0, atol=1e-5)
            logits.square().mean().backward()
        assert_close(*([x.grad for x in each.parameters()] for each in (model, eager)), rtol=1e-4, atol=1e-6)
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        after = compiled(x)
    assert not torch.allclose(after, before, atol=1e-3)
    assert_close(after, eager(x), rtol=0, atol=1e-5)


def replay(change: Callable[[Tensor], Tensor], x: Tensor | None = None, **options: Any) -> None:
    """Record a pass of two rows of 70 tokens, and replay its changed blocks for others."""
    model = build().requires_grad_(False)
    with record_indices(model) as handle:
        model(drawn(70))
    if options.pop("cached", False):
        options["caches"] = model.new_caches(2, 80)
    with replay_indices(model, [change(each) for each in handle.indices()]):
        model(drawn(70) if x is None else x, **options)


def record(*models: nn.Module, **options: Any) -> None:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(record_indices(model))
        models[0](torch.ones(1, 20, 32) if isinstance(models[0], NativeSparseAttention) else drawn(70), **options)


def in_a_dense_stage() -> DecoderLM:
    model = build()
    model.attend_densely()
    return model


ONE, LAYER = build(), make()
OF_RANKS = replace(LAYER.layout(20), source=Mock())
THREE = {"x": drawn(90, 1), "document_ids": torch.arange(90)[None] // 30}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no selected branch": (lambda: record(make(branches=("cmp",), config=CHOOSES)), "model: expected layers of NSA"),
    "a dense stage": (lambda: record(in_a_dense_stage()), "model: expected layers that choose .* got a dense stage"),
    "tokens of ranks": (lambda: record(LAYER, layout=OF_RANKS), "model: expected .* got tokens that ranks share"),
    "a handle already": (lambda: record(ONE, ONE), "model: expected one without a handle"),
    "nothing recorded": (lambda: record_indices(build()).indices(), "indices: expected a recorded pass"),
    "too few layers": (lambda: replay_indices(build(), []), "indices: expected those of 2 layers"),
    "other heads": (lambda: replay(lambda x: x.repeat(1, 2, 1, 1)), "indices: expected 5 blocks of 1 key heads"),
    "fewer rows": (lambda: replay(lambda x: x[:1]), "indices: expected those of 2 documents of up to 70 tokens"),
    "fewer tokens": (lambda: replay(lambda x: x[:, :, :68]), "indices: expected those of 2 documents of up to 70"),
    "more documents": (lambda: replay(Tensor.clone, **THREE), "indices: expected those of 3 documents of up to 30"),
    "larger blocks": (lambda: replay(lambda x: x[:, :, :20].repeat_interleave(4, 2)), "indices: expected blocks of 8"),
    "a cache": (lambda: replay(Tensor.clone, cached=True), "cache: expected None where blocks are replayed"),
    "a step": (lambda: replay(Tensor.clone, drawn(1), cached=True), "cache: expected None where blocks are replayed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
