"""What only a GPU can show of ``generate`` in transformers: graphs give the tokens of a model that is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexnsa.transformers import FlexNSACache
from tests.integrations.transformers.families import FEW, ROPES, converted, own, pad_left, tokens

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": [*range(3, 8)]}


@pytest.mark.parametrize("kind", ["three branches", "selected branch", "given frequencies", "own decoder"])
def test_captured_steps_give_the_tokens_of_steps_that_are_called(kind: str) -> None:
    few = FEW | {"select_block_size": 16}  # the smallest tile of tensor cores
    options = few | {"branches": ["slc"]} if kind == "selected branch" else few
    turning = {"rope_parameters": ROPES["llama3"]} if kind == "given frequencies" else {}
    model = (own(nsa=few) if kind == "own decoder" else converted("qwen3", options, **turning)).float().cuda()
    rows = {name: x.cuda() for name, x in pad_left([tokens(50), tokens(31), tokens(9)]).items()}
    caches = [FlexNSACache(model.config, 64) for _ in range(2)]  # which grow on the way
    got, want = (
        model.generate(**rows, **GREEDY, past_key_values=cache, disable_compile=called)
        for cache, called in zip(caches, (False, True), strict=True)
    )
    assert torch.equal(got, want)
    assert caches[0].captured is not None
    assert caches[1].captured is None
    more = torch.cat((got, tokens(3, 7).cuda()), dim=1)
    mask = torch.cat((rows["attention_mask"], torch.ones(3, more.shape[1] - 50).cuda()), dim=1)
    got, want = (
        model.generate(more, **GREEDY, attention_mask=mask, past_key_values=cache, disable_compile=called)
        for cache, called in zip(caches, (False, True), strict=True)
    )
    assert torch.equal(got, want)
