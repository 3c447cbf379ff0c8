"""Converted layers on a cache do what the library's own layer does: count what they read, and give NaN at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexnsa import NSAConfig
from flexnsa.cache.steps import ReadCounter
from flexnsa.transformers import FlexNSACache
from tests.integrations.transformers.families import FEW, converted, tokens

SIZES = NSAConfig(**FEW)


def cached_model(length: int, capacity: int) -> tuple[Any, Any]:
    """A model of one layer, and a cache that holds two sequences of this length."""
    model = converted("llama", FEW, num_hidden_layers=1)
    cache: Any = FlexNSACache(model.config, capacity)
    model(tokens(2, length), past_key_values=cache)
    return model, cache


@torch.no_grad()
@pytest.mark.parametrize("length", [9, 40])
def test_reads_of_a_prefill_are_those_of_its_steps(length: int) -> None:
    model, cache = cached_model(length, 120)
    kept = cache.layers[0].nsa
    counts = []
    for parts in ([length], [1] * length):
        cache.reset()
        kept.reads = ReadCounter()
        for part in tokens(2, length).split(parts, dim=1):
            model(part, past_key_values=cache)
        counts.append(kept.reads)
    assert counts[0] == counts[1]
    assert min(counts[0].keys.values()) > 0


@torch.no_grad()
def test_a_token_beyond_the_end_of_a_compiled_step_is_nan() -> None:
    model, cache = cached_model(29, 30)
    cache.seen = 20  # as after the replay of a graph, of which the host does not know
    torch.compiler.reset()
    step = torch.compile(model.model.layers[0].self_attn, fullgraph=True, backend="aot_eager")
    out, _ = step(torch.randn(2, 2, 48, dtype=torch.float64), past_key_values=cache)
    assert out.isnan().all(-1).tolist() == [[False, True]] * 2
    assert not out[:, 0].isnan().any()
    assert cache.layers[0].nsa.lengths.tolist() == [30, 30]
