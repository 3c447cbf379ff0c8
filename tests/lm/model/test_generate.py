"""Generation: the cache changes the speed and no token; sampling, stopping, streaming and batches of ragged prompts."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.lm import DecoderConfig, DecoderLM, Sampling

CONFIG = DecoderConfig(
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=6,
    nsa=NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=4, window_size=12),
)
INDEXED = replace(CONFIG.nsa, index_heads=1, index_block_size=4, index_stride=4)
MODELS: dict[str, dict[str, Any]] = {"nsa": {}, "dense": {"attention": "dense"}, "an indexer": {"nsa": asdict(INDEXED)}}
GREEDY = Sampling(temperature=0)


def make_model(attention: str = "nsa", **changes: object) -> DecoderLM:
    """A model whose predictions are not all alike: large embeddings and logits."""
    torch.manual_seed(1)
    values = CONFIG.to_dict() | {"attention": attention} | changes
    model = DecoderLM(DecoderConfig.from_dict(values)).eval()
    with torch.no_grad():
        model.head.weight.mul_(20)
        for layer in model.layers:
            layer.get_submodule("attention.w_o").weight.mul_(8)  # pyright: ignore[reportCallIssue, reportOperatorIssue]
    return model


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(3))


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
    lengths = torch.tensor([17, 1, 9])
    options = {"lengths": lengths, "sampling": sampling, "seed": 5}
    cached, uncached = (model.generate(prompts(3, 17), 24, cached=cached, **options) for cached in (True, False))
    assert cached == uncached


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_row_of_a_batch_is_what_it_is_alone(attention: str) -> None:
    model = make_model(attention)
    lengths = torch.tensor([17, 1, 9])
    together = model.generate(prompts(3, 17), 24, lengths=lengths, sampling=GREEDY)
    for row, length in enumerate(lengths.tolist()):
        alone = model.generate(prompts(3, 17)[row : row + 1, :length], 24, sampling=GREEDY)
        assert together[row] == alone[0]


def test_a_row_ends_at_its_stop_token_and_leaves_the_others_alone() -> None:
    model = make_model()
    free = model.generate(prompts(2, 9), 30, sampling=GREEDY)
    stop = free[0][10]
    stopped = model.generate(prompts(2, 9), 30, sampling=GREEDY, stop_tokens={stop})
    for with_stop, without in zip(stopped, free, strict=True):
        assert with_stop == (without[: without.index(stop)] if stop in without else without)
    assert len(stopped[0]) <= 10


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


def test_a_model_that_predicts_nan_is_told() -> None:
    model = make_model()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(FloatingPointError, match=r"logits: expected finite numbers, got \[nan"):
            model.generate(prompts(1, 5), 3, sampling=sampling)


def test_tokens_stream_in_order_as_they_are_drawn() -> None:
    model = make_model()
    seen: list[tuple[int, int]] = []
    rows = model.generate(prompts(2, 5), 7, on_token=lambda row, token: seen.append((row, token)))
    assert seen == [(row, rows[row][step]) for step in range(7) for row in range(2)]


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    model = make_model()
    one, again, other = (model.generate(prompts(1, 5), 20, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


class TestSampling:
    LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])

    def drawn(self, sampling: Sampling, count: int = 400) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        draws = torch.cat([sampling.draw(self.LOGITS, generator) for _ in range(count)])
        return torch.bincount(draws, minlength=4) / count

    def test_temperature_0_takes_the_likeliest(self) -> None:
        assert self.drawn(GREEDY)[1] == 1

    def test_frequencies_are_the_probabilities(self) -> None:
        for temperature in (1.0, 3.0):
            expected = (self.LOGITS[0] / temperature).softmax(-1)
            torch.testing.assert_close(self.drawn(Sampling(temperature=temperature), 4000), expected, atol=0.03, rtol=0)

    def test_the_smallest_temperatures_take_the_likeliest(self) -> None:
        for temperature in (1e-40, 1e-45, 5e-324):
            assert self.drawn(Sampling(temperature=temperature))[1] == 1
        assert self.drawn(Sampling(temperature=float("inf"))).min() > 0.15

    def test_top_k_keeps_the_k_likeliest(self) -> None:
        assert self.drawn(Sampling(top_k=2)).nonzero().flatten().tolist() == [1, 3]
        assert self.drawn(Sampling(top_k=9, temperature=5)).count_nonzero() == 4

    def test_top_p_keeps_the_fewest_that_reach_it(self) -> None:
        """The probabilities are 0.64, 0.24, 0.09 and 0.03."""
        for top_p, kept in ((5e-324, [1]), (0.5, [1]), (0.7, [1, 3]), (0.9, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
            assert self.drawn(Sampling(top_p=top_p), 2000).nonzero().flatten().tolist() == kept
