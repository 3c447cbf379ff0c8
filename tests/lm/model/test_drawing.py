"""How tokens are drawn: in groups, behind each of which the host looks, and none of a logit of -inf, however hot."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexnsa.lm import Sampling, generate_tokens
from flexnsa.lm.generation.steps import Draws
from tests.lm.model.sessions import GREEDY, LENGTHS, make_model, prompts


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
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 5, 5, 6, 7, 7, 7, 7, 7, 7, 7], [9] * 12]
    texts += [[5, 2, 6, 8, 7, 1, 1, 1, 1, 1, 1, 1], [3, 4, 3, 3, 9, 1, 1, 1, 1, 1, 1, 1]]
    seen: list[tuple[int, int]] = []
    stops = [(5, 6, 7), 8, (6, 8, 7), (3, 9)]
    told = {"group": group, "on_token": lambda *token: seen.append(token)}
    rows = generate_tokens(Script(texts), prompts(5) % 100, 12, sampling=GREEDY, stop_tokens=stops, **told)
    # The first by a stop of three tokens, before that of one; the fourth by one within another of three.
    assert rows == [[1, 2, 3, 4], [5, 6, 5], [9] * 12, [5, 2, 6], [3, 4, 3]]
    assert [[token for row, token in seen if row == index] for index in range(5)] == rows
    assert [row for row, _ in seen][:3] == [0, 2, 0]  # the others wait: 5, 6 and 3 may begin a stop


@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_prediction_that_is_no_number_is_told_once_it_is_needed(group: int) -> None:
    texts, seen = [[1, 2, 3, 4, 5, 6, 7, 8]], []
    options: dict[str, Any] = {"sampling": GREEDY, "group": group, "on_token": lambda *token: seen.append(token)}
    with pytest.raises(FloatingPointError, match=r"logits: expected finite numbers, got \[nan\]"):
        generate_tokens(Script(texts, 4), prompts(1) % 100, 8, **options)
    assert seen == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert generate_tokens(Script(texts, 4), prompts(1) % 100, 8, stop_tokens=[4], **options) == [[1, 2, 3]]


LOGITS = [-math.inf, 0.0, 3.0, -math.inf, 1.0, 2.0, -math.inf]
OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"top_k": 5}, {"top_k": 9}, {"top_k": 3, "top_p": 0.9}]
OPTIONS += [{"top_p": 5e-324}, {"top_p": 0.6}, {"top_p": 1.0}]
TEMPERATURES = [0.0, 5e-324, 1e-40, 1e-3, 1.0, 50.0, 1e30, math.inf]


def frequencies(sampling: Sampling, dtype: torch.dtype, count: int = 4000) -> Tensor:
    rows = torch.tensor([LOGITS], dtype=dtype).repeat(count, 1)
    return torch.bincount(sampling.draw(rows, torch.Generator().manual_seed(0)), minlength=len(LOGITS)) / count


def probabilities(temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The likeliest tokens by their logits, as Python's numbers have them."""
    ranked = sorted((x for x in LOGITS if x != -math.inf), reverse=True)
    weights = [math.exp((x - ranked[0]) / max(temperature, 5e-324)) if x < ranked[0] else 1.0 for x in ranked]
    weights = [x / sum(weights) for x in weights[:top_k]] if top_k is None else weights[:top_k]
    total, kept = sum(weights), list[float]()
    for weight in weights:
        if top_p is None or not kept or sum(kept) < top_p * total * (1 - 1e-6):
            kept.append(weight)
    share = dict(zip(ranked, kept, strict=False))
    return torch.tensor([share.get(x, 0.0) / sum(kept) for x in LOGITS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_frequencies_are_those_of_what_is_allowed(
    temperature: float, options: dict[str, Any], dtype: torch.dtype
) -> None:
    expected = probabilities(temperature, options.get("top_k"), options.get("top_p"))
    found = frequencies(Sampling(temperature=temperature, **options), dtype)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert found[expected == 0].max() == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("largest", [math.inf, -math.inf, math.nan])
def test_a_largest_logit_that_is_not_finite_is_refused(largest: float, temperature: float) -> None:
    logits = torch.tensor([[-math.inf, largest, -math.inf]])
    with pytest.raises(FloatingPointError, match=r"^logits: expected finite numbers, got \[.*\] as the largest"):
        Sampling(temperature=temperature).draw(logits, torch.Generator())


@pytest.mark.parametrize("options", [{}, {"cached": False}, {"steps": "compiled"}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, math.inf])
def test_generation_draws_no_token_that_the_head_bans(
    temperature: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, allowed = make_model("dense", num_layers=1), [3, 97, 200]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor's C++ takes seconds

    def ban(_head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        return torch.full_like(logits, -math.inf).index_copy(-1, torch.tensor(allowed), logits[..., allowed])

    model.head.register_forward_hook(ban)
    rows = model.generate(prompts(3, 5), 40, sampling=Sampling(temperature=temperature), **options)
    drawn = {token for row in rows for token in row}
    assert drawn <= {*allowed}
    assert drawn == {*allowed} or temperature == 1
