"""The sm_90 kernels of a decoding step: right for rows of different lengths, and nothing of the cache is copied."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from flexnsa.attention.implementations import CACHED_IMPLEMENTATIONS, REFERENCE
from flexnsa.attention.seam import Call, Implementation
from flexnsa.masks.user_mods import ScoreMod
from flexnsa.positions import Positions
from tests.support.inputs import SMALL

HEADS, DIMS, CAPACITY = 2, (32, 16), 301
BRANCHES = ("cmp", "slc", "win")


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


def attention(implementation: Implementation, branch: str, mod: ScoreMod | None) -> Callable[..., Any]:
    def run(q: Tensor, k: Tensor, v: Tensor, token: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        zero = torch.zeros_like(token)
        positions = Positions(token, zero, zero)
        call = Call(SMALL, 0.3, mod, positions, positions)
        if branch == "slc":
            attended = implementation.selected(q, k, v, chosen, call)
        elif branch == "win":
            attended = implementation.window(q, k, v, call)
        else:
            attended = implementation.compressed(q, k, v, call)
        return attended.out, attended.lse, chosen  # every argument is a graph's input

    return run


def distance_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - 0.01 * (h + 1) * (q_idx - kv_idx)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(
    ("batch", "count", "groups", "dtype", "mod"),
    [
        (3, 1, 16, torch.float32, None),
        (2, 3, 6, torch.float32, None),
        (1, 1, 4, torch.bfloat16, None),
        (2, 2, 6, torch.float32, distance_bias),
    ],
)
def test_kernels_match_the_oracle(
    branch: str, batch: int, count: int, groups: int, dtype: torch.dtype, mod: Any, toolkit: SimpleNamespace
) -> None:
    def make() -> tuple[Tensor, ...]:
        return arguments(branch, batch, count, groups, dtype)

    module = toolkit.emit(attention(CACHED_IMPLEMENTATIONS["flex"], branch, mod), make, backward=False).check()
    assert "SPLIT_KV" in module.source("inference")
    inputs = make()
    out, lse, *_ = toolkit.interpreted(module)(*inputs)
    exact = [x.double() for x in inputs[:3]]
    want_out, want_lse, *_ = attention(REFERENCE, branch, mod)(*exact, *inputs[3:])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (out - want_out).abs().max() <= tolerance * want_out.abs().max()
    assert (lse - want_lse).masked_fill(empty, 0).abs().max() <= tolerance * want_lse[~empty].abs().max()


def test_a_step_of_the_layer_copies_nothing_of_the_cache_and_spills_nothing(toolkit: SimpleNamespace) -> None:
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

    module = toolkit.emit(run, make, backward=False).check()
    allocated = [line for line in module.source("inference").splitlines() if "= empty_strided" in line]
    assert allocated
    assert not [line for line in allocated if f"{capacity + 1}" in line or f"{capacity // 16}, 128" in line]
    kernels = [kernel for kernel in module.kernels if kernel.kind == "template"]
    resources = toolkit.compile_all(kernels)
    assert len(resources) == 3
    assert all(r.stack == 0 for r in resources)
