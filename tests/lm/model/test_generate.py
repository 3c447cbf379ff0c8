"""Generation: the cache changes the speed and no token; stopping and batches of ragged prompts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexnsa.lm import Sampling
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


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_row_ends_at_a_whole_stop_sequence_and_not_at_its_parts(length: int) -> None:
    model = make_model()
    free = model.generate(prompts(2, 9), 30, sampling=GREEDY)
    stop = tuple(free[0][10 : 10 + length])
    absent = next((first, second) for first in free[0] for second in range(256) if (first, second) not in pairs(free))
    seen: list[list[int]] = [[], []]
    stopped = model.generate(
        prompts(2, 9),
        30,
        sampling=GREEDY,
        stop_tokens=[stop, absent],
        on_token=lambda row, token: seen[row].append(token),
    )
    assert stopped == seen
    for with_stop, without in zip(stopped, free, strict=True):
        starts = [start for start in range(31 - length) if tuple(without[start : start + length]) == stop]
        assert with_stop == (without[: starts[0]] if starts else without)


@pytest.mark.parametrize("cached", [True, False])
def test_prompts_stay_as_they_were(cached: bool) -> None:
    given = prompts(2, 17)
    make_model().generate(given, 5, lengths=torch.tensor([9, 4]), cached=cached)
    assert torch.equal(given, prompts(2, 17))


def pairs(rows: list[list[int]]) -> set[tuple[int, int]]:
    return {pair for row in rows for pair in itertools.pairwise(row)}


def test_of_two_stops_the_one_that_is_whole_first_ends_the_row() -> None:
    model = make_model()
    (free,) = model.generate(prompts(1, 9), 30, sampling=GREEDY)
    long, short = tuple(free[5:9]), free[7]
    (stopped,) = model.generate(prompts(1, 9), 30, sampling=GREEDY, stop_tokens=[long, short])
    assert stopped == free[: free.index(short)]


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    model = make_model()
    one, again, other = (model.generate(prompts(1, 5), 20, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
