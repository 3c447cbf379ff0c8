"""Groups of tokens, stops within them, and a step on fixed memory: all of generation on a GPU but the graph itself."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa import NSAConfig
from flexnsa.decoding.row_cache import RowCache
from flexnsa.models import DecoderConfig, DecoderLM, DecodingSession, Sampling, generate_tokens
from flexnsa.models import session as session_file
from flexnsa.models.steps import Draws

SIZES = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=12)
GREEDY = Sampling(temperature=0)
LENGTHS = torch.tensor([17, 1, 9])


def make_model(attention: str = "nsa") -> DecoderLM:
    """A model whose predictions are not all alike: large embeddings and logits."""
    torch.manual_seed(1)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
    model = DecoderLM(DecoderConfig(dim=32, num_layers=2, **heads, nsa=SIZES, attention=attention)).eval()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        model.head.weight.mul_(20)
        for layer in model.layers:
            layer.get_submodule("attention.w_o").weight.mul_(8)  # pyright: ignore[reportCallIssue, reportOperatorIssue]
    return model


def prompts(batch: int = 3, length: int = 17, seed: int = 3) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


class Script:
    """A language model whose rows continue with ``texts[b]``; from token ``broken`` on it predicts no number."""

    def __init__(self, texts: list[list[int]], broken: int | None = None) -> None:
        self.texts, self.broken, self.steps = torch.tensor(texts), broken, 0
        self.embedding = nn.Embedding(100, 1)

    def new_caches(self, batch_size: int, max_seq_len: int) -> list[Any]:
        del batch_size, max_seq_len
        return [SimpleNamespace(reset=lambda: None)]

    def __call__(self, tokens: Tensor, *, caches: Any = None, lengths: Tensor | None = None) -> Tensor:
        assert caches is not None
        assert lengths is not None
        self.steps = 1 if tokens.shape[1] > 1 else self.steps + 1
        logits = nn.functional.one_hot(self.texts[:, self.steps - 1], 100)[:, None].expand(-1, tokens.shape[1], -1)
        return logits.double() if self.broken is None or self.steps <= self.broken else logits * torch.nan


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
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=50, temperature=2.0)])
def test_tokens_do_not_depend_on_how_many_are_drawn_between_two_looks(attention: str, sampling: Sampling) -> None:
    model = make_model(attention)
    free = model.generate(prompts(), 21, lengths=LENGTHS, sampling=sampling, cached=False)
    stops = [free[0][6], tuple(free[1][6:9]), tuple(free[2][14:18])]  # in a group of 8, and across two
    rows = [
        model.generate(prompts(), 21, lengths=LENGTHS, sampling=sampling, stop_tokens=stops, group=group)
        for group in (None, 1, 3, 8)
    ]
    assert rows[0] == model.generate(prompts(), 21, lengths=LENGTHS, sampling=sampling, stop_tokens=stops, cached=False)
    assert rows[1:] == [rows[0]] * 3
    assert max(map(len, rows[0])) < 21


@pytest.mark.parametrize(("group", "looks"), [(1, 21), (3, 8), (8, 4)])
def test_the_host_looks_once_a_group_and_the_last_is_no_longer_than_what_is_left(
    group: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    read = Draws.read
    monkeypatch.setattr(Draws, "read", lambda self, count: counts.append(count) or read(self, count))
    generate_tokens(make_model(), prompts(), 21, group=group)
    assert (len(counts), sum(counts), max(counts)) == (looks, 21, group)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_what_was_drawn_behind_a_stop_is_thrown_away_and_rows_end_when_they_do(group: int) -> None:
    model = Script([[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 5, 5, 6, 7, 7, 7, 7, 7, 7, 7], [9] * 12])
    seen: list[tuple[int, int]] = []
    stops = [(5, 6, 7), 8]
    told = {"group": group, "on_token": lambda *token: seen.append(token)}
    rows = generate_tokens(model, prompts() % 100, 12, sampling=GREEDY, stop_tokens=stops, **told)
    assert rows == [[1, 2, 3, 4], [5, 6, 5], [9] * 12]  # the first by a stop of three tokens, before that of one
    assert [[token for row, token in seen if row == index] for index in range(3)] == rows
    assert [row for row, _ in seen][:3] == [0, 2, 0]  # the second waits: 5 and 6 may begin a stop


@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_prediction_that_is_no_number_is_told_once_it_is_needed(group: int) -> None:
    texts, seen = [[1, 2, 3, 4, 5, 6, 7, 8]], []
    options: dict[str, Any] = {"sampling": GREEDY, "group": group, "on_token": lambda *token: seen.append(token)}
    with pytest.raises(FloatingPointError, match=r"logits: expected finite numbers, got \[nan\]"):
        generate_tokens(Script(texts, 4), prompts(1) % 100, 8, **options)
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert generate_tokens(Script(texts, 4), prompts(1) % 100, 8, stop_tokens=[4], **options) == [[1, 2, 3]]


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
    with gc_off():
        del session
        assert buffer() is None


@contextmanager
def gc_off() -> Iterator[None]:
    """Without a collector only what is in no circle is freed."""
    gc.disable()
    try:
        yield
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
    session = DecodingSession(make_model(attention), 3, 40, sampling=GREEDY)
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
    model = make_model(attention)
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


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "graph"}, "steps: expected 'compiled' or 'eager' on cpu, got 'graph'"),
        ({"steps": "graph", "mask_mod": near}, "steps: expected 'compiled' or 'eager' with mask_mod, got 'graph'"),
        ({"steps": "fast"}, "steps: expected one of 'auto', 'graph', 'compiled', 'eager', got 'fast'"),
        ({"steps": "compiled", "cached": False}, "steps: expected one of 'auto', 'eager', got 'compiled'"),
        ({"steps": 1}, "steps: expected one of .*, got 1"),
        ({"group": 0}, "group: expected at least 1, got 0"),
        ({"group": 9}, "group: expected at most 8, got 9"),
        ({"score_mod": 3}, "score_mod: expected"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        generate_tokens(make_model(), prompts(), 3, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.step(), "prompts: expected some to continue, got a step before the first prefill"),
        (lambda session: session.step(9), "count: expected at most 8, got 9"),
        (lambda session: session.prefill(prompts(2)), "prompts: expected 3 rows, as the session has, got a tensor"),
        (lambda session: session.generate(prompts(2), 3), "prompts: expected 3 rows, as the session has"),
        (lambda session: session.prefill(prompts(), LENGTHS - 1), "lengths: expected 1 .. 17"),
        (lambda session: session.set_active([True]), "active: expected one for each of 3 rows, got 1"),
        (lambda session: session.set_active([2, 0, 1]), "active: expected bool, got 2"),
        (lambda session: session.set_active(True), "active: expected Sequence, got True"),
        (lambda session: session.reserve(0), "max_seq_len: expected at least 1, got 0"),
    ],
)
def test_wrong_calls_of_a_session_are_named(call: Callable[[DecodingSession], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(DecodingSession(make_model("dense"), 3, 20))
