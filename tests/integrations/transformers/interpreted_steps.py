"""Steps of converted models by the kernels that take all of one, in Triton's interpreter: the logits of both ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa.transformers import FlexNSACache
from tests.integrations.transformers.families import FEW, INDEX, ROPES, converted, pad_left, tokens
from tests.support.triton_decoding import recording_steps

CASES: dict[str, dict[str, Any]] = {
    "norms, three branches": {"family": "qwen3"},
    "biases, selected branch": {"family": "qwen2", "branches": ["slc"]},
    "no compressed branch": {"family": "llama", "branches": ["slc", "win"]},
    "shared index": {"family": "qwen3", "layers": 2, "share_index": 2, **INDEX},
    "given frequencies": {"family": "llama", "rope": "llama3"},
    "given frequencies and a scale": {"family": "llama", "branches": ["slc"], "rope": "yarn"},
}
STEPS = 5


@torch.no_grad()
def run(family: str, rope: str | None = None, layers: int = 1, **options: Any) -> dict[str, Tensor]:
    """Continue two rows of different lengths: step by step on a cache, and as whole rows."""
    turning = {} if rope is None else {"rope_parameters": ROPES[rope]}
    model = converted(family, FEW | options, num_hidden_layers=layers, **turning).float()
    rows = [tokens(40), tokens(29)]
    more = tokens(2, STEPS)
    _attend_by(model, "reference")
    whole = [model(torch.cat((row, new))[None], use_cache=False).logits for row, new in zip(rows, more, strict=True)]
    batch, cache = pad_left(rows), FlexNSACache(model.config)
    model(**batch, past_key_values=cache)
    _attend_by(model, "triton")
    mask, got = batch["attention_mask"], []
    with recording_steps() as taken:
        for step in range(STEPS):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            got.append(model(more[:, step, None], attention_mask=mask, past_key_values=cache).logits)
    assert len(taken) == STEPS * layers
    return {"got": torch.cat(got, 1), "want": torch.cat([logits[:, -STEPS:] for logits in whole])}


def _attend_by(model: Any, impl: str) -> None:
    model.config.flexnsa["impl"] = impl


def interpret(name: str) -> dict[str, Tensor]:
    """Run a case."""
    return run(**CASES[name])
