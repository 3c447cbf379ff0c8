"""Retrieval: of 65,536 tokens, those that a query asks for are selected and read."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from tests.support.decoding import decode


def test_needles_in_65536_tokens_are_selected_and_read(chosen: list[Tensor]) -> None:
    """Sixteen tokens stand out, each in a direction of its own; at the end, sixteen ask for one direction each."""
    dim, length, count = 32, 65_536, 16
    layer = NativeSparseAttention(
        dim, 1, 1, dim, branches=("slc",), compression="mean", impl="sdpa", rope_base=1e300
    ).requires_grad_(False)
    for name, size in (("w_q", 16.0), ("w_k_slc", 1.0), ("w_v_slc", 1.0), ("w_o", 2.0)):
        layer.get_submodule(f"{name}").weight = torch.nn.Parameter(torch.eye(dim) * size, requires_grad=False)
    layer.gate.linear.weight.zero_()  # sigmoid(0) = 1/2, made up for by w_o

    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0)) / dim**0.5
    x[..., [0, dim // 2]] = 0  # the one pair that RoPE turns at this base
    direction = torch.eye(dim)[[*range(1, dim // 2), dim // 2 + 1]]
    depth = [(2 * i + 1) * (length - count) // (2 * count) for i in range(count)]
    x[0, depth], x[0, -count:] = 8 * direction, direction

    cache = layer.new_cache(1, length, max_rewind=count)
    prefill = layer(x, cache=cache)[:, -count:]
    cache.crop(length - count)
    steps = decode(layer, x[:, -count:], [1] * count, cache)
    for out, blocks in ((prefill, chosen[0][0, 0, -count:]), (steps, torch.cat(chosen[1:], dim=2)[0, 0])):
        torch.testing.assert_close(out[0], x[0, depth], rtol=0, atol=1e-3)
        assert [position // 64 in row for position, row in zip(depth, blocks.tolist(), strict=True)] == [True] * count
