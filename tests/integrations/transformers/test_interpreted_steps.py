"""Steps of converted models, by kernels that take all of one and branch by branch: what whole rows give and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from flexnsa.cache.steps import ReadCounter
from flexnsa.transformers import FlexNSACache
from flexnsa.transformers.attention import ConvertedAttention
from tests.integrations.transformers import interpreted_steps
from tests.integrations.transformers.families import FEW, INDEX, ROPES, converted, tokens
from tests.support.interpreter import Interpret


@pytest.mark.parametrize("name", interpreted_steps.CASES)
def test_steps_equal_whole_rows(name: str, interpret: Interpret) -> None:
    found = interpret(interpreted_steps, name)
    assert_close(found["got"], found["want"], atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        *(({"rope_parameters": rope}, name not in ("dynamic", "longrope")) for name, rope in ROPES.items()),
        ({"opening": 0.5}, False),
        ({"hook": True}, False),
        ({"index": INDEX}, True),
    ],
)
def test_layers_that_the_kernels_do_not_compute_go_branch_by_branch(changes: dict[str, Any], takes: bool) -> None:
    rope = {name: value for name, value in changes.items() if name == "rope_parameters"}
    model = converted("llama", FEW | changes.get("index", {}), **rope)
    layer: ConvertedAttention = model.model.layers[0].self_attn
    model.config.flexnsa["opening"] = changes.get("opening", 1.0)
    if "hook" in changes:
        layer.compress_k.register_forward_hook(lambda *_: None)
    cache: Any = FlexNSACache(model.config)
    model(tokens(1, 20), past_key_values=cache)
    x = torch.randn(1, 1, 48, dtype=torch.float64)
    assert layer.takes_step(x, cache.layers[0].nsa) == takes


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
