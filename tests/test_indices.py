"""Recorded and replayed blocks: a text is trained on the blocks with which it was drawn, however it was drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close

from flexnsa import NativeSparseAttention, SelectionLoss
from flexnsa.attention import dispatch
from flexnsa.indices import record_indices, replay_indices
from flexnsa.lm import DecoderConfig, DecoderLM, DecodingSession, Sampling
from tests.support.decoding import taught
from tests.support.inputs import TINY

CHOOSES = replace(TINY, num_selected_blocks=5)  # 3 are forced
INDEXED = replace(CHOOSES, index_heads=2, index_block_size=2, index_stride=2)
MODEL = DecoderConfig(dim=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, nsa=INDEXED, share_index=2)
MODELS: dict[str, dict[str, Any]] = {
    "an indexer": {"share_index": 1},
    "a shared index": {},
    "a list of leaders": {"share_index": (0, 1, 0, 1)},
    "compressed keys": {"share_index": 1, "nsa": CHOOSES},
    "selected keys": {"share_index": 1, "nsa": CHOOSES, "branches": ("slc",)},
}
LENGTHS = torch.tensor([60, 41, 7])
NEW = 30


def build(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    model = DecoderLM(replace(MODEL, **changes))
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            taught(layer)
    return model


def drawn(*shape: int) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(3))


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
    prompts, seen = drawn(3, 60), list[Tensor]()
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
        assert read.sum(2).tolist() == [[length + NEW - 1] * 2 for length in LENGTHS.tolist()]  # the last is not read
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
def test_rejected_drafts_and_emptied_caches_leave_no_trace() -> None:
    model, x = build(), drawn(2, 70)
    caches = [layer.attention.new_cache(2, 80, max_rewind=4) for layer in model.layers]  # pyright: ignore
    with record_indices(model) as handle:
        model(x.flip(1), caches=caches)
        for cache in caches:
            cache.reset()
        model(x[:, :40], caches=caches)
        for at in range(40, 70, 2):
            model(255 - x[:, at : at + 4], caches=caches)
            for cache in caches:
                cache.crop(at)
            model(x[:, at : at + 2], caches=caches)
            for cache in caches:
                cache.grow(90)
        recorded = handle.indices()
        model(x)
        whole = handle.indices()
    for one, other in zip(recorded, whole, strict=True):
        assert torch.equal(one[:, :, :70], other)
        assert (one[:, :, 72:] == -1).all()


@torch.no_grad()
def test_packed_prompts_of_a_cache_and_sessions_are_recorded_by_sequence() -> None:
    model, x = build(), drawn(2, 60)
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


def gradients(model: DecoderLM, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    selection = SelectionLoss(num_queries=20)
    (model(x, targets=x, selection=selection) + selection.total).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_recorded_choice(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(checkpointing=checkpointing), drawn(2, 70)
    with record_indices(model) as handle:
        expected = gradients(model, x)
    indices = handle.indices()
    with replay_indices(model, indices):
        assert all(torch.equal(grad, expected[name]) for name, grad in gradients(model, x).items())
    choose_otherwise(model, monkeypatch)
    with replay_indices(model, indices):
        found = gradients(model, x)
    assert found.keys() == expected.keys()
    for name, grad in found.items():  # indexers are others, and learn the same shares from other scores
        assert torch.equal(grad, expected[name]) != (".indexer." in name), name


@pytest.mark.parametrize("by_layer", [False, True])
def test_compiled_models_record_replay_and_become_what_they_were(
    by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, model, x = build(), build(), drawn(2, 70)
    torch.compiler.reset()
    compiled: Any = model if by_layer else torch.compile(model, fullgraph=True)
    if by_layer:
        model.compile_layers(fullgraph=True)
    before = compiled(x)
    with record_indices(eager) as expected, record_indices(model) as handle:
        assert_close(compiled(x), eager(x), rtol=0, atol=1e-5)
    assert all(map(torch.equal, handle.indices(), expected.indices()))
    for each in (model, eager):
        torch.manual_seed(5)
        choose_otherwise(each, monkeypatch)
    with replay_indices(model, handle.indices()), replay_indices(eager, handle.indices()):
        losses = [each(x, targets=x) for each in (compiled, eager)]
        for loss in losses:
            loss.backward()
        assert_close(*losses)
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
        assert_close(compiled(x), before, rtol=0, atol=1e-5)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert not torch.allclose(compiled(x), before, atol=1e-3)
    assert_close(compiled(x), eager(x), rtol=0, atol=1e-5)


def replay(
    change: Callable[[Tensor], Tensor], *size: int, documents: Tensor | None = None, cached: bool = False
) -> None:
    model = build().requires_grad_(False)
    with record_indices(model) as handle:
        model(drawn(2, 70))
    options: dict[str, Any] = {"caches": model.new_caches(2, 80)} if cached else {"document_ids": documents}
    with replay_indices(model, [change(each) for each in handle.indices()]):
        model(drawn(*size or (2, 70)), **options)


def record(*handles: DecoderLM) -> None:
    with ExitStack() as stack:
        for model in handles:
            stack.enter_context(record_indices(model))
        handles[0](drawn(2, 70))


def in_a_dense_stage() -> DecoderLM:
    model = build()
    model.attend_densely()
    return model


ONE, THREE = build(), torch.arange(90)[None] // 30
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no selected branch": (
        lambda: record(build(**MODELS["selected keys"] | {"branches": ("win",)})),
        "model: expected l",
    ),
    "dense attention": (lambda: record(build(attention="dense", share_index=1)), "model: expected layers of NSA with"),
    "a dense stage": (lambda: record(in_a_dense_stage()), "model: expected layers that choose .* got a dense stage"),
    "a handle already": (lambda: record(ONE, ONE), "model: expected one without a handle"),
    "nothing recorded": (lambda: record_indices(build()).indices(), "indices: expected a recorded pass"),
    "too few layers": (lambda: replay_indices(build(), []), "indices: expected those of 2 layers"),
    "another dtype": (lambda: replay(Tensor.long), r"indices\[0\]: expected dtype torch.int32"),
    "no dimension of heads": (lambda: replay(lambda x: x[:, 0]), r"indices\[0\]: expected shape"),
    "other heads": (lambda: replay(lambda x: x[:, :1]), "indices: expected 5 blocks of 2 key heads"),
    "fewer blocks": (lambda: replay(lambda x: x[..., :4]), "indices: expected 5 blocks of 2 key heads"),
    "fewer rows": (lambda: replay(lambda x: x[:1]), "indices: expected those of 2 documents of up to 70 tokens"),
    "fewer tokens": (lambda: replay(lambda x: x[:, :, :68]), "indices: expected those of 2 documents of up to 70"),
    "more documents": (lambda: replay(Tensor.clone, 1, 90, documents=THREE), "indices: expected those of 3 documents"),
    "larger blocks": (
        lambda: replay(lambda x: x.where(x < 0, x // 2)),
        "indices: expected blocks of 8 tokens that end",
    ),
    "a later block": (lambda: replay(lambda x: x + (x >= 0)), "indices: expected blocks of 8 tokens that end with 0"),
    "a cache": (lambda: replay(Tensor.clone, cached=True), "cache: expected None where blocks are replayed"),
    "a step": (lambda: replay(Tensor.clone, 2, 1, cached=True), "cache: expected None where blocks are replayed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
