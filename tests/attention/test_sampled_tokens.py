"""Which queries the selection loss looks at: a function of integers, one query of each stretch."""

from __future__ import annotations

import pytest
import torch

from flexnsa.attention.sampling import sampled_tokens


@pytest.mark.parametrize(("seq_len", "count"), [(8192, 256), (1000, 256), (100, 99), (100, 1)])
def test_each_stretch_gives_one_query(seq_len: int, count: int) -> None:
    tokens = sampled_tokens(seq_len, count, 0, 0, torch.arange(3))
    edges = torch.arange(count + 1) * seq_len // count
    assert ((tokens >= edges[:-1]) & (tokens < edges[1:])).all()


def test_a_short_sequence_gives_all_of_its_queries() -> None:
    assert sampled_tokens(5, 256, 1, 2, torch.arange(2)).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_padded_sequence_gives_the_queries_that_it_gives_alone() -> None:
    lengths = torch.tensor([0, 1, 5, 99, 100, 101, 250, 300])
    padded = sampled_tokens(300, 100, 1, 2, torch.arange(8), lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = sampled_tokens(length, 100, 1, 2, torch.tensor([row])) if length else torch.zeros(1, 0)
        assert padded[row].tolist() == alone[0].tolist() + [-1] * (100 - alone.shape[1])


def test_tokens_are_drawn_evenly_and_differ_by_seed_step_and_sequence() -> None:
    tokens = sampled_tokens(64 * 100, 100, 0, 0, torch.arange(500)) % 64
    counts = tokens.flatten().bincount(minlength=64)
    assert ((counts - 50_000 / 64).abs() < 5 * (50_000 / 64) ** 0.5).all()
    first, ids = sampled_tokens(6400, 100, 0, 0, torch.arange(1)), torch.arange(1)
    for other in ((1, 0, ids), (0, 1, ids), (0, 0, ids + 1), (2**40, 0, ids)):
        assert (sampled_tokens(6400, 100, *other) != first).float().mean() > 0.9


def test_seed_and_step_may_be_tensors() -> None:
    for number in (0, 7, 2**40 + 3, -5):
        as_tensor = sampled_tokens(640, 10, torch.tensor(number), torch.tensor(number + 1), torch.arange(4))
        assert torch.equal(as_tensor, sampled_tokens(640, 10, number, number + 1, torch.arange(4)))
