"""What only a GPU can show of decoding: rows of different lengths, token by token, against whole sequences; fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache, record_indices
from tests.support.inputs import SMALL

pytestmark = pytest.mark.gpu

LENGTHS = (150, 61, 9)
"""Of prompts in one batch."""


def test_gpu_steps_equal_the_whole_sequence() -> None:
    layer, x, whole, blocks = decoded_layer()
    rows = torch.arange(3, device="cuda")
    done = torch.tensor(LENGTHS, device="cuda")
    with record_indices(layer) as handle, torch.no_grad():
        cache = prompts_of(layer, x)
        for count in (1, 1, 3, 1, 7, 2):  # 7 tokens are the most that the decoding kernel takes, of 16 rows each
            index = rows[:, None], done[:, None] + torch.arange(count, device="cuda")
            torch.testing.assert_close(layer(x[index], cache=cache), whole[index], rtol=0, atol=1e-5)
            done = done + count
    for row, length in enumerate(done.tolist()):
        assert torch.equal(handle.indices()[0][row, :, :length], blocks[row, :, :length])
    assert cache.lengths.tolist() == done.tolist()


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_256_steps_use_one_cuda_graph_of_torch_compile(impl: str) -> None:
    layer, x, whole, _ = decoded_layer(impl)
    cache = prompts_of(layer, x)
    torch.compiler.reset()  # another test's graphs of a layer would count as compiled before
    counters = torch._dynamo.utils.counters["inductor"]
    skipped = counters["cudagraph_skips"]
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_steps_equal(lambda x: compiled(x, cache=cache), x, whole, 256)
    assert counters["cudagraph_skips"] == skipped


@torch.no_grad()
def test_packed_and_changing_sequences_equal_each_alone() -> None:
    """Prompts as one pack, rows that are forgotten, and a step that was captured before; nothing waits for them."""
    layer, x, whole, _ = decoded_layer("triton")
    lengths, rows = torch.tensor(LENGTHS, device="cuda"), torch.arange(3, device="cuda")
    packed = torch.cat([row[:length] for row, length in zip(x, LENGTHS, strict=True)])[None]
    ids = torch.repeat_interleave(rows, lengths)[None]
    cache, other = layer.new_cache(5, 400), layer.new_cache(3, max(LENGTHS))
    layer(packed, document_ids=ids, cache=other)  # compiles
    now, active = x.new_zeros(5, 1, 64), torch.tensor([1, 0, 1, 0, 1], dtype=torch.int32, device="cuda")
    layer(now, cache=cache, lengths=active)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(now, cache=cache, lengths=active)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.reset()
        other.reset()
        prompts = layer(packed, document_ids=ids, cache=other)
        cache.insert([0, 1, 2], other)
        cache.insert([2, 4], other, [1, 2])
        cache.reset([1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for row, part in enumerate(prompts[0].split(LENGTHS)):
        torch.testing.assert_close(part, whole[row, : len(part)], rtol=0, atol=1e-5)
    sources = torch.tensor([0, 1, 2], device="cuda")
    for step in range(40):
        now[[0, 2, 4], 0] = x[sources, lengths + step]
        graph.replay()
        torch.testing.assert_close(out[[0, 2, 4], 0], whole[sources, lengths + step], rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_a_step_beyond_the_capacity_raises_or_is_nan_in_a_graph(impl: str) -> None:
    layer = NativeSparseAttention(64, 16, 2, 32, config=SMALL, impl=impl).cuda().requires_grad_(False)
    cache = layer.new_cache(2, 10)
    x = torch.randn(2, 10, 64, device="cuda")
    layer(x[:, :9], cache=cache, lengths=torch.tensor([9, 4], device="cuda"))
    step = torch.compile(layer, fullgraph=True)
    for lost in ([False, False], [True, False]):
        assert step(x[:, :1], cache=cache).isnan().all(-1).flatten().tolist() == lost
    with pytest.raises(ValueError, match=r"x: expected at most 0 tokens, .* of 10 has room in row 0, got 1"):
        layer(x[:, :1], cache=cache)


def decoded_layer(impl: str = "flex") -> tuple[NativeSparseAttention, Tensor, Tensor, Tensor]:
    """A layer, tokens, and what the oracle makes of them: the output and the selected blocks."""
    torch.manual_seed(0)
    layer = NativeSparseAttention(64, 16, 2, 32, config=SMALL, impl="reference").cuda().requires_grad_(False)
    x = torch.randn(3, max(LENGTHS) + 256, 64, device="cuda")
    with record_indices(layer) as handle:
        whole = layer(x)
    layer.impl = impl
    return layer, x, whole, handle.indices()[0]


def prompts_of(layer: NativeSparseAttention, x: Tensor) -> NSACache:
    """Prefill a new cache with prompts of different lengths."""
    cache = layer.new_cache(*x.shape[:2])
    layer(x[:, : max(LENGTHS)], cache=cache, lengths=torch.tensor(LENGTHS, device="cuda"))
    return cache


@torch.no_grad()
def assert_steps_equal(step: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor, count: int) -> None:
    rows, first = torch.arange(3, device="cuda"), torch.tensor(LENGTHS, device="cuda")
    for number in range(count):
        torch.compiler.cudagraph_mark_step_begin()
        out = step(x[rows, first + number][:, None])
        torch.testing.assert_close(out[:, 0], whole[rows, first + number], rtol=0, atol=1e-5)
