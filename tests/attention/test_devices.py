"""Each implementation on a CPU: it computes by itself, or refuses by name; nothing else computes in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexnsa
from flexnsa.config import num_compressed
from flexnsa.lm import DecoderConfig, DecoderLM, DecodingSession
from tests.support.inputs import SMALL

S, N = 40, num_compressed(40, SMALL)
Q, K, K_CMP = torch.ones(1, 4, S, 16), torch.ones(1, 2, S, 16), torch.ones(1, 2, N, 16)
BLOCKS = torch.full((1, 2, S, SMALL.num_selected_blocks), -1, dtype=torch.int32)
GATES = torch.ones(1, 4, S, 3)
IDS = torch.zeros(1, S, dtype=torch.int64)


def layer(impl: str) -> flexnsa.NativeSparseAttention:
    return flexnsa.NativeSparseAttention(32, 4, 2, 16, config=SMALL, impl=impl).requires_grad_(False)


def model(impl: str) -> DecoderLM:
    config = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, nsa=SMALL, impl=impl)
    return DecoderLM(config).requires_grad_(False)


def step(impl: str, num_tokens: int, *, after: int = 0, max_rewind: int = 1, **options: Any) -> object:
    """Call a layer with a cache that holds so many tokens."""
    one = layer("sdpa")
    cache = one.new_cache(1, 64, max_rewind=max_rewind)
    if after:
        one(torch.ones(1, after, 32), cache=cache)
    one.impl, before = impl, cache.state_dict()
    try:
        return one(torch.ones(1, num_tokens, 32), cache=cache, **options)
    except ValueError:
        assert all(torch.equal(value, before[name]) for name, value in cache.state_dict().items())
        assert cache.is_empty == (after == 0)
        raise


CALLS: dict[str, Callable[[str], object]] = {
    "native_sparse_attention": lambda impl: flexnsa.native_sparse_attention(
        Q, K, K, GATES, k_cmp=K_CMP, v_cmp=K_CMP, config=SMALL, impl=impl
    ),
    "compressed_attention": lambda impl: flexnsa.compressed_attention(Q, K_CMP, K_CMP, config=SMALL, impl=impl),
    "selected_attention": lambda impl: flexnsa.selected_attention(Q, K, K, BLOCKS, config=SMALL, impl=impl),
    "sliding_window_attention": lambda impl: flexnsa.sliding_window_attention(Q, K, K, config=SMALL, impl=impl),
    "select_blocks": lambda impl: flexnsa.select_blocks(Q, K_CMP, config=SMALL, impl=impl),
    "a layer": lambda impl: layer(impl)(torch.ones(1, S, 32)),
    "a prefill": lambda impl: step(impl, S),
    "a prefill of documents": lambda impl: step(impl, S, document_ids=IDS),
    "a first token": lambda impl: step(impl, 1),
    "a token": lambda impl: step(impl, 1, after=20),
    "several tokens": lambda impl: step(impl, 12, after=20),
    "a draft": lambda impl: step(impl, 4, after=20, max_rewind=4),
    "a padded step": lambda impl: step(impl, 4, after=20, lengths=torch.tensor([2])),
    "a model": lambda impl: model(impl)(torch.ones(1, S, dtype=torch.int64)),
    "generate": lambda impl: model(impl).generate(torch.ones(1, 20, dtype=torch.int64), 3),
    "generate from few": lambda impl: model(impl).generate(torch.ones(1, 2, dtype=torch.int64), 3),
    "generate without a cache": lambda impl: model(impl).generate(torch.ones(1, 2, dtype=torch.int64), 3, cached=False),
    "a session": lambda impl: DecodingSession(model(impl), 1, 30).prefill(torch.ones(1, 4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_triton_on_a_cpu_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"^[qkx](_cmp)?: expected a CUDA device with impl='triton', got cpu"):
        CALLS[name]("triton")


@pytest.mark.parametrize("name", CALLS)
def test_the_others_compute_the_same_on_a_cpu(name: str) -> None:
    results: list[object] = []
    for impl in ("sdpa", "reference"):
        torch.manual_seed(0)
        results.append(CALLS[name](impl))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
