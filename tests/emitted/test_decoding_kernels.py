"""The sm_90 kernels of a decoding step: right for rows of different lengths, and nothing of the cache is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from flexnsa.attention.dispatch import CACHED_IMPLEMENTATIONS, REFERENCE
from tests.emitted.calls import BRANCHES, cached_attention
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.emitted.machine_code import resources
from tests.support.inputs import SMALL

HEADS, DIMS, CAPACITY = 2, (32, 16), 301


def tokens(batch: int, count: int) -> list[list[int]]:
    """Rows of a batch stand far apart: the first before its second compressed token, the second near the end."""
    return [[(9, 280, 150)[row] + step for step in range(count)] for row in range(batch)]


def blocks(token: int, head: int) -> list[int]:
    """Block 0, the query's own, and between them another for each head."""
    chosen = sorted({0, token // 16, token // 32 + head})
    return chosen + [-1] * (SMALL.num_selected_blocks - len(chosen))


def arguments(branch: str, batch: int, count: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    num_keys = CAPACITY // SMALL.compress_stride if branch == "cmp" else CAPACITY
    places = tokens(batch, count)
    chosen = [[[blocks(token, head) for token in row] for head in range(HEADS)] for row in places]
    return (
        torch.randn(batch, HEADS * groups, count, DIMS[0], dtype=dtype),
        torch.randn(batch, HEADS, num_keys, DIMS[0], dtype=dtype),
        torch.randn(batch, HEADS, num_keys, DIMS[1], dtype=dtype),
        torch.tensor(places, dtype=torch.int32),
        torch.tensor(chosen, dtype=torch.int32),
    )


def distance_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - 0.01 * (h + 1) * (q_idx - kv_idx)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("batch", "count", "groups", "dtype", "mod"),
    [(3, 1, 16, torch.float32, None), (1, 1, 4, torch.bfloat16, None), (2, 3, 6, torch.float32, distance_bias)],
)
def test_kernels_match_the_oracle(
    branch: str, batch: int, count: int, groups: int, dtype: torch.dtype, mod: Any
) -> None:
    def make() -> tuple[Tensor, ...]:
        return arguments(branch, batch, count, groups, dtype)

    module = emit(cached_attention(CACHED_IMPLEMENTATIONS["flex"], branch, mod), make, backward=False)
    assert "SPLIT_KV" in module.source("inference")
    inputs = make()
    out, lse, *_ = interpreted(module)(*inputs)
    exact = [x.double() for x in inputs[:3]]
    want_out, want_lse, *_ = cached_attention(REFERENCE, branch, mod)(*exact, *inputs[3:])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (out - want_out).abs().max() <= tolerance * want_out.abs().max()
    assert (lse - want_lse).masked_fill(empty, 0).abs().max() <= tolerance * want_lse[~empty].abs().max()


def test_a_step_of_the_layer_copies_nothing_of_the_cache_and_spills_nothing() -> None:
    batch, capacity, step = 2, 4096, {}

    def make() -> tuple[Any, ...]:
        torch.set_default_dtype(torch.bfloat16)
        layer = NativeSparseAttention(256, 64, 4, 128, impl="flex").requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        cache = layer.new_cache(batch, capacity, dtype=torch.bfloat16)
        step["layer"], step["cache"] = layer, cache
        tensors = {name: x for name, x in vars(cache).items() if isinstance(x, Tensor)}
        return torch.randn(batch, 1, 256, dtype=torch.bfloat16), dict(layer.named_parameters()), cache.buffers, tensors

    def run(x: Tensor, *_: Any) -> Tensor:
        return step["layer"](x, cache=step["cache"])

    module = emit(run, make, backward=False)
    allocated = [line for line in module.source("inference").splitlines() if "= empty_strided" in line]
    assert allocated
    assert not [line for line in allocated if f"{capacity + 1}" in line or f"{capacity // 16}, 128" in line]
    kernels = [kernel for kernel in module.kernels if kernel.is_template]
    assert len(kernels) == 3
    assert all(resources(kernel).spilled == 0 for kernel in kernels)
