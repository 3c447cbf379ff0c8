"""Generation: the cache changes the speed and no token, under autocast too; ragged prompts and wrong options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa.lm import DecodingSession, Sampling, generate_tokens
from tests.lm.model.sessions import GREEDY, LENGTHS, SIZES, make_model, prompts

INDEXED = replace(SIZES, index_heads=1, index_block_size=4, index_stride=4)
MODELS: dict[str, dict[str, Any]] = {"nsa": {}, "dense": {"attention": "dense"}, "an indexer": {"nsa": INDEXED}}


def test_512_greedy_tokens_are_those_without_a_cache() -> None:
    """One forward pass over the generated text has the tokens of greedy decoding without a cache."""
    model = make_model()
    prompt = prompts(1, 20)
    (tokens,) = model.generate(prompt, 512, sampling=GREEDY)
    assert len(tokens) == 512
    assert len(set(tokens)) > 20
    text = torch.cat([prompt, torch.tensor([tokens])], dim=1)
    with torch.no_grad():
        best = model(text)[0].argmax(-1)
    assert best[19:-1].tolist() == tokens


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=50, top_p=0.9)])
def test_running_the_whole_sequence_every_time_gives_the_same_tokens(kind: str, sampling: Sampling) -> None:
    model = make_model(**MODELS[kind])
    options = {"lengths": LENGTHS, "sampling": sampling, "seed": 5}
    cached, uncached = (model.generate(prompts(3, 17), 24, cached=cached, **options) for cached in (True, False))
    assert cached == uncached


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_row_of_a_batch_is_what_it_is_alone(attention: str) -> None:
    model = make_model(attention)
    together = model.generate(prompts(3, 17), 24, lengths=LENGTHS, sampling=GREEDY)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = model.generate(prompts(3, 17)[row : row + 1, :length], 24, sampling=GREEDY)
        assert together[row] == alone[0]


@pytest.mark.parametrize("cached", [True, False])
def test_prompts_stay_as_they_were(cached: bool) -> None:
    given = prompts(2, 17)
    make_model().generate(given, 5, lengths=torch.tensor([9, 4]), cached=cached)
    assert torch.equal(given, prompts(2, 17))


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    model = make_model()
    one, again, other = (model.generate(prompts(1, 5), 20, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


KINDS = ["nsa", "dense"]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", KINDS)
def test_steps_under_autocast_are_as_near_as_whole_rows(attention: str, dtype: torch.dtype) -> None:
    model, x = make_model(attention), prompts(2, 20)
    exact = model.double()(x)
    model.float()
    with torch.autocast("cpu", dtype):
        caches = model.new_caches(2, 20)
        assert {cache.dtype for cache in caches} == {dtype}
        steps = torch.cat([model(part, caches=caches) for part in x.split([12] + [1] * 8, dim=1)], dim=1)
        whole = model(x)
    error, plain = ((out.double() - exact).norm() for out in (steps, whole))
    assert error <= 1.5 * plain


@pytest.mark.parametrize("attention", KINDS)
def test_generate_and_a_session_run_under_autocast(attention: str) -> None:
    model = make_model(attention)
    with torch.autocast("cpu", torch.bfloat16):
        session = DecodingSession(model, 2, 30, sampling=GREEDY)
        drawn = session.generate(prompts(2, 20), 5)
        assert model.generate(prompts(2, 20), 5, sampling=GREEDY) == drawn
    assert [len(row) for row in drawn] == [5, 5]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("attention", KINDS)
def test_without_autocast_a_cache_is_of_the_dtype_of_the_weights(attention: str, dtype: torch.dtype) -> None:
    model = make_model(attention).to(dtype)
    assert {cache.dtype for cache in model.new_caches(2, 20)} == {dtype}
    if dtype == torch.float64:  # which autocast leaves alone
        with torch.autocast("cpu", torch.bfloat16):
            assert {cache.dtype for cache in model.new_caches(2, 20)} == {dtype}


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("length", [3, 12])
def test_a_cache_made_without_autocast_is_named_under_it(attention: str, length: int) -> None:
    model = make_model(attention)
    caches = model.new_caches(2, 20)
    expected = r"^cache: expected dtype=torch.bfloat16, as the layer has it, got torch.float32"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=expected):
        model(prompts(2, 20)[:, :length], caches=caches)
    assert all(cache.is_empty for cache in caches)


def generate(sampling: dict[str, Any] | None = None, **options: Any) -> None:
    generate_tokens(make_model(), **options, sampling=Sampling(**sampling or {}))


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return q_idx - kv_idx < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": {"temperature": -1.0}}, "temperature: expected at least 0, got -1.0"),
        ({"sampling": {"temperature": float("nan")}}, "temperature: expected a finite number, got nan"),
        ({"sampling": {"temperature": None}}, "temperature: expected a number, got None"),
        ({"sampling": {"top_k": 0}}, "top_k: expected at least 1, got 0"),
        ({"sampling": {"top_p": 0.0}}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"sampling": {"top_p": 1.5}}, "top_p: expected more than 0 and at most 1, got 1.5"),
        ({"prompts": torch.zeros(1, 0, dtype=torch.int64)}, "prompts: expected no empty dimension"),
        ({"prompts": torch.zeros(1, 4)}, "prompts: expected dtype torch.int32 or torch.int64"),
        ({"prompts": torch.zeros(4, dtype=torch.int64)}, "prompts: expected shape"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"seed": 10**20}, "seed: expected at most"),
        ({"stop_tokens": [()]}, "stop_tokens: expected at least one token in a sequence"),
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
        generate(**{"prompts": prompts(), "max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda session: session.step(), "prompts: expected some to continue, got a step before the first prefill"),
        (lambda session: session.step(9), "count: expected at most 8, got 9"),
        (lambda session: session.prefill(prompts(2)), "prompts: expected 3 rows, as the session has, got a tensor"),
        (lambda session: session.generate(prompts(2), 3), "prompts: expected 3 rows, as the session has"),
        (lambda session: session.set_active([True]), "active: expected one for each of 3 rows, got 1"),
        (lambda session: session.set_active([2, 0, 1]), "active: expected bool, got 2"),
        (lambda session: session.set_active(True), "active: expected Sequence, got True"),
        (lambda session: session.reserve(0), "max_seq_len: expected at least 1, got 0"),
    ],
)
def test_wrong_calls_of_a_session_are_named(call: Callable[[DecodingSession], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(DecodingSession(make_model("dense"), 3, 20))
