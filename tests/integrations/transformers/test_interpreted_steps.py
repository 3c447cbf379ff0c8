"""Steps of converted models by the kernels that take all of one: what whole rows give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

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
