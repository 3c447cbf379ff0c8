"""Retrieval: of 65,536 tokens, those that a query asks for are selected and read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexnsa import NativeSparseAttention
from flexnsa.functional.indices import record_indices
from tests.support.decoding import decode
from tests.support.triton_decoding import recording_steps

COUNT = 16


def test_needles_in_65536_tokens_are_selected_and_read() -> None:
    _find_needles("sdpa", "cpu")


@pytest.mark.gpu
def test_needles_are_found_on_a_gpu() -> None:
    with recording_steps():
        _find_needles("triton", "cuda")


def _find_needles(impl: str, device: str) -> None:
    """Sixteen tokens stand out, each in a direction of its own; at the end, sixteen ask for one direction each."""
    dim, length = 32, 65_536
    options: dict[str, Any] = {"branches": ("slc",), "compression": "mean", "rope_base": 1e300}
    layer = NativeSparseAttention(dim, 1, 1, dim, impl=impl, **options).requires_grad_(False)
    for name, size in (("w_q", 16.0), ("w_k_slc", 1.0), ("w_v_slc", 1.0), ("w_o", 2.0)):
        layer.get_submodule(f"{name}").weight = torch.nn.Parameter(torch.eye(dim) * size, requires_grad=False)
    layer.gate.linear.weight.zero_()  # sigmoid(0) = 1/2, made up for by w_o
    layer.to(device)

    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0)) / dim**0.5
    x[..., [0, dim // 2]] = 0  # the one pair that RoPE turns at this base
    direction = torch.eye(dim)[[*range(1, dim // 2), dim // 2 + 1]]
    depth = [(2 * i + 1) * (length - COUNT) // (2 * COUNT) for i in range(COUNT)]
    x[0, depth], x[0, -COUNT:] = 8 * direction, direction

    x = x.to(device)
    cache = layer.new_cache(1, length, max_rewind=COUNT)
    with record_indices(layer) as handle:
        prefill = layer(x, cache=cache)[:, -COUNT:], handle.indices()
        cache.crop(length - COUNT)
        steps = decode(layer, x[:, -COUNT:], [1] * COUNT, cache), handle.indices()
    for out, (blocks,) in (prefill, steps):
        torch.testing.assert_close(out[0], x[0, depth], rtol=0, atol=1e-3)
        chosen = blocks[0, 0, -COUNT:].tolist()
        assert all(position // 64 in row for position, row in zip(depth, chosen, strict=True))
