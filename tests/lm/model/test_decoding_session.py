"""A session steps on fixed memory and looks at no value: all of generation on a GPU but the graph itself."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa.cache.rows import RowCache
from flexnsa.lm import DecodingSession, Sampling
from flexnsa.lm.generation import session as session_file
from flexnsa.lm.generation.steps import Draws
from tests.lm.model.sessions import GREEDY, LENGTHS, make_model, prompts


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that are captured: as a graph does, each demands that its memory stays where it was. Counts replays."""
    replays: list[int] = []

    def capture(step: Callable[[], None], device: torch.device, **options: Any) -> Callable[[], None]:
        session, number = step.__self__, len(replays)  # pyright: ignore[reportFunctionMemberAccess]
        assert options["generator"] is session._draws.generator
        assert device == options["generator"].device
        replays.append(0)
        step()  # warms up
        captured = [x.data_ptr() for x in fixed_tensors(session)]

        def replay() -> None:
            assert [x.data_ptr() for x in fixed_tensors(session)] == captured
            replays[number] += 1
            step()

        return replay

    monkeypatch.setattr(session_file, "capture", capture)
    monkeypatch.setattr(session_file, "choose_steps", lambda *_: "graph")
    return replays


def fixed_tensors(session: DecodingSession) -> Iterator[Tensor]:
    for owner in (session, session._draws, *session.caches):
        for value in vars(owner).values():
            yield from (x for x in (value.values() if isinstance(value, dict) else [value]) if isinstance(x, Tensor))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_session_serves_many_prompts_by_one_step_on_fixed_memory(attention: str, graphs: list[int]) -> None:
    model, sampling = make_model(attention), Sampling(top_k=90)
    session = DecodingSession(model, 3, 40, sampling=sampling)
    for seed in (1, 2):
        rows = session.generate(prompts(seed=seed), 20, lengths=LENGTHS, seed=seed, group=8)
        alone = model.generate(prompts(seed=seed), 20, lengths=LENGTHS, sampling=sampling, seed=seed, cached=False)
        assert rows == alone
    assert graphs == [2 * 19]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_session_doubles_its_room_and_captures_anew(attention: str, graphs: list[int]) -> None:
    model = make_model(attention)
    session = DecodingSession(model, 3, 5)
    assert session.generate(prompts(3, 2), 3) == model.generate(prompts(3, 2), 3, cached=False)
    expected = model.generate(prompts(), 20, lengths=LENGTHS, cached=False)
    assert session.generate(prompts(), 20, lengths=LENGTHS) == expected  # known before the prompts are read
    assert (session.max_seq_len, len(graphs)) == (40, 2)

    small = DecodingSession(model, 3, 17)
    first = small.prefill(prompts(), LENGTHS)
    drawn = [first, *(small.step(count) for count in (1, 8, 8, 2))]  # the first of them finds no room
    assert torch.cat([tokens for tokens, _ in drawn], dim=1).tolist() == expected
    assert (small.max_seq_len, len(graphs)) == (68, 5)


def test_a_session_that_found_no_memory_captures_once_there_is_some(
    graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("dense")
    expected = model.generate(prompts(), 6, lengths=LENGTHS, cached=False)

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    session = DecodingSession(model, 3, 17)
    for owner, name in ((RowCache, "grow"), (session_file, "capture")):
        session = DecodingSession(model, 3, 17)
        first = session.prefill(prompts(), LENGTHS)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(torch.OutOfMemoryError):
                session.step()
        replayed = sum(graphs)
        drawn = torch.cat([first.tokens, session.step(5).tokens], dim=1)
        assert drawn.tolist() == expected
        assert sum(graphs) == replayed + 5

    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "grow", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            session.reserve(1000)
    replayed = sum(graphs)
    session.generate(prompts(3, 2), 3)
    assert sum(graphs) == replayed + 2


def test_a_session_that_nobody_keeps_gives_its_memory_back_at_once() -> None:
    session = DecodingSession(make_model(), 3, 40)
    session.generate(prompts(), 3)
    buffer = weakref.ref(next(iter(session.caches[0].buffers.values())))
    gc.disable()  # only what is in no circle is freed then
    try:
        del session
        assert buffer() is None
    finally:
        gc.enable()


def test_new_prompts_go_on_in_rows_that_were_off() -> None:
    session = DecodingSession(make_model(), 3, 40, sampling=GREEDY)
    session.prefill(prompts(), LENGTHS)
    expected = session.step(4)
    session.set_active([False, True, False])
    session.prefill(prompts(), LENGTHS)
    assert torch.equal(session.step(4).tokens, expected.tokens)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_row_that_is_switched_off_keeps_its_tokens(attention: str) -> None:
    session = DecodingSession(make_model(attention), 3, 40, sampling=GREEDY)
    session.prefill(prompts(), LENGTHS)
    session.set_active([True, False, True])
    session.step(8)
    assert {tuple(cache.lengths.tolist()) for cache in session.caches} == {(25, 1, 17)}


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_step_looks_at_no_value(attention: str) -> None:
    """A compiler that may not leave its graph stops at whatever would wait for a device."""
    session = DecodingSession(make_model(attention, num_layers=1), 3, 40, sampling=GREEDY)
    session.prefill(prompts(), LENGTHS)
    with torch.no_grad():
        torch.compile(session._next, fullgraph=True, backend="eager")()
    compiled = session._draws.read(1)
    session.prefill(prompts(), LENGTHS)
    assert torch.equal(session.step().tokens, compiled.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=9, top_p=0.9)])
def test_a_draw_looks_at_no_value(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "exponential_", lambda x, **_: x.fill_(0.5))  # of fake tensors, none by a generator
    with FakeTensorMode():  # which has none
        draws = Draws(3, sampling, torch.device("cpu"))
        draws.draw(torch.randn(3, 50))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_compiled_steps_give_the_same_tokens(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(attention, num_layers=1)
    eager = model.generate(prompts(), 12, lengths=LENGTHS, steps="eager")
    # All of the compiler but its last part: Inductor would spend half a minute in a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert model.generate(prompts(), 12, lengths=LENGTHS, steps="compiled") == eager


def test_mods_are_decoded_as_whole_sequences_are() -> None:
    model = make_model()
    mods: dict[str, Any] = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.5 * (q_idx - kv_idx),  # noqa: ARG005
        "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 1,  # noqa: ARG005
    }
    cached, uncached = (
        model.generate(prompts(), 12, lengths=LENGTHS, sampling=GREEDY, cached=cached, **mods)
        for cached in (True, False)
    )
    assert cached == uncached
    assert cached != model.generate(prompts(), 12, lengths=LENGTHS, sampling=GREEDY)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@torch.no_grad()
def test_last_logits_are_those_of_the_last_tokens_and_the_head_sees_no_other(attention: str) -> None:
    model = make_model(attention)
    expected = model(prompts())[torch.arange(3), LENGTHS - 1]
    seen: list[torch.Size] = []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    torch.testing.assert_close(model.last_logits(prompts(), lengths=LENGTHS), expected)
    caches = model.new_caches(3, 17)
    torch.testing.assert_close(model.last_logits(prompts(), lengths=LENGTHS, caches=caches), expected)
    assert all(cache.lengths.tolist() == LENGTHS.tolist() for cache in caches)
    torch.testing.assert_close(model.last_logits(prompts())[0], expected[0])
    assert seen == [(3, 32)] * 3
