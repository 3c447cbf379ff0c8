"""Continuous batching of transformers: each request gets the tokens that ``generate`` gives it alone."""

from __future__ import annotations

import gc
import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

from flexnsa import NSAConfig
from flexnsa.layers.compression import average_blocks
from flexnsa.transformers import dropin, paged
from flexnsa.transformers.paged import average_pages
from tests.integrations.transformers.families import FEW, converted, dense, own, sparse, tokens
from tests.integrations.transformers.test_mixed_layers import mixed

TEXT = tokens(70).tolist()
PROMPTS = [TEXT[:61], TEXT[:50], TEXT[3:10], TEXT[9:70], [*TEXT[:40], 5, 9], TEXT[30:63], [4]]
"""More tokens than go into a pass or into all pages, some of them the same."""
PAGES = ContinuousBatchingConfig(max_batch_tokens=64, num_blocks=14, block_size=16)
NEW: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
MODELS: dict[str, Any] = {
    "selected branch": lambda: sparse("llama", FEW),
    "three branches": lambda: sparse("qwen3", FEW | {"branches": ["cmp", "slc", "win"], "gates": [0.3, 1.0, 0.2]}),
    "soft cap, sliding layers": lambda: mixed("gemma2"),
    "sinks, sliding layers": lambda: mixed("gpt_oss"),
    "sliding layers": lambda: mixed("gemma3"),
    "shared keys, sliding layers": lambda: mixed("gemma3n"),
}


def served(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    config = GenerationConfig(**NEW, eos_token_id=-1)
    out = model.generate_batch(prompts, config, continuous_batching_config=PAGES, progress_bar=False, **options)
    assert all(request.error is None for request in out.values())
    in_order = sorted(out.values(), key=lambda each: int(each.request_id.split("_")[-1]))
    return [each.generated_tokens for each in in_order]


def alone(model: Any, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), **NEW, eos_token_id=None)[0, len(prompt) :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_come_and_go_get_the_tokens_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = MODELS[name](), []
    pages = dropin.attend_to_pages

    def attend(module: Any, query: Any, *args: Any, **options: Any) -> Any:
        passes.append((query.shape[2], len(options["cu_seq_lens_q"]) - 1))
        return pages(module, query, *args, **options)

    monkeypatch.setattr(dropin, "attend_to_pages", attend)
    want = [alone(model, prompt) for prompt in PROMPTS]
    assert served(model, PROMPTS) == want
    assert len({tuple(each) for each in want}) > 3
    assert max(count for _, count in passes) > 2
    assert max(length for length, _ in passes) <= 64 < sum(map(len, PROMPTS))


@torch.no_grad()
def test_positions_know_the_longest_request_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA kernels score no blocks beyond it."""
    attend, bounds = paged.attend_to_own_keys, []

    def attend_within(q: Any, k: Any, v: Any, compress: Any, positions: Any, *args: Any, **options: Any) -> Any:
        bounds.append((int((positions.token - positions.start).max()) + 1, positions.longest, k.shape[2]))
        return attend(q, k, v, compress, positions, *args, **options)

    monkeypatch.setattr(paged, "attend_to_own_keys", attend_within)
    served(sparse("llama", FEW), PROMPTS)
    assert all(reached <= longest <= num_keys for reached, longest, num_keys in bounds)
    assert any(longest < num_keys for _, longest, num_keys in bounds)


def test_flexnsa_is_not_replaced_by_a_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FlashAttention is installed, transformers takes that for any attention but its own."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    model = sparse("llama", FEW)
    assert served(model, PROMPTS[3:4]) == [alone(model, PROMPTS[3])]
    assert model.config._attn_implementation == "flexnsa"


def test_blocks_of_pages_are_averaged_as_those_of_packed_documents() -> None:
    keys, first = torch.randn(1, 40, 2, 8).transpose(1, 2), torch.tensor([0, 2, 4, 17, 19, 36])
    sizes = replace(NSAConfig(**FEW), compress_block_size=4, compress_stride=2)
    torch.testing.assert_close(average_pages(keys, first, sizes), average_blocks(keys, first[None], sizes))


@pytest.mark.parametrize(("make", "name"), [(lambda: converted("qwen3", FEW), "Qwen3"), (own, "")])
def test_layers_with_several_keys_for_a_token_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"generate_batch: expected .* one key and value .* FlexNSA{name}ForCausalLM"):
        served(make(), PROMPTS[:1])


def test_requests_to_other_models_are_left_to_transformers() -> None:
    manager: Any = continuous_api.ContinuousBatchingManager
    switch = manager.switch_to_cb_friendly_attn
    assert switch.__code__.co_filename == continuous_api.__file__  # ``wraps`` changes the names alone
    copied, changed = deepcopy(sparse("llama", FEW)), pickle.loads(pickle.dumps(sparse("llama", FEW)))
    assert served(copied, PROMPTS[:1]) == [alone(copied, PROMPTS[0])]
    assert manager.switch_to_cb_friendly_attn is switch
    with pytest.raises(AttributeError):
        changed.init_continuous_batching(generation_config=3)
    assert manager.switch_to_cb_friendly_attn is switch
    changed.set_attn_implementation("eager")
    assert served(changed, PROMPTS[:1]) == [alone(dense("llama"), PROMPTS[0])]


def test_a_model_is_freed_without_a_collector() -> None:
    gc.disable()
    model = sparse("llama", FEW)
    freed = ref(model)
    del model
    gc.enable()
    assert freed() is None
