"""FlexAttention on a CPU, compiled: each branch against a dense softmax in float64 with an explicit boolean mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa import (
    NativeSparseAttention,
    compressed_attention,
    native_sparse_attention,
    selected_attention,
    sliding_window_attention,
)
from flexnsa.attention import compilation
from flexnsa.attention.dispatch import FLEX
from flexnsa.attention.flex import branches as flex
from flexnsa.attention.interface import BranchOutput, Call
from flexnsa.config import num_compressed
from tests.support.dense import dense_attention, visible_keys
from tests.support.inputs import SMALL, make_inputs

AWKWARD = {"cmp": (1000, 777, 601), "slc": (1000, 601, 25, 24), "win": (1000, 777, 601)}
"""Of one graph: fewer tokens than a tile of queries, and fewer compressed ones than two tiles, would have another."""
SHORT = (25, 24, 16, 8, 7, 1)
BRANCHES = ("cmp", "slc", "win")
SCALE = -0.3


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    """Each test is a program of its own: one number of heads, one dtype, any lengths."""
    torch._dynamo.reset()


def inputs(branch: str, batch: int, heads: int, groups: int, seq_len: int, dims: tuple[int, int], dtype: torch.dtype):
    num_keys = num_compressed(seq_len, SMALL) if branch == "cmp" else seq_len
    shapes = (
        (batch, heads * groups, seq_len, dims[0]),
        (batch, heads, num_keys, dims[0]),
        (batch, heads, num_keys, dims[1]),
    )
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def random_blocks(batch: int, heads: int, seq_len: int) -> Tensor:
    """Up to ``n`` random blocks for each query, among them its own."""
    size, most = SMALL.select_block_size, SMALL.num_selected_blocks
    own = torch.arange(seq_len) // size
    candidates = torch.arange(int(own.max()) + most)
    rank = torch.rand(batch, heads, seq_len, len(candidates)) + (candidates == own[:, None]).float()
    rank = rank.masked_fill(candidates > own[:, None], -1.0)
    best, blocks = rank.topk(most, -1)
    blocks = torch.where(best < 0, len(candidates), blocks).sort(-1).values
    return torch.where(blocks == len(candidates), -1, blocks).int()


def dense(branch: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    visible = visible_keys(branch, (q.shape[2],), SMALL, blocks if branch == "slc" else None)
    return dense_attention(q.double(), k.double(), v.double(), visible, SCALE)[0]


def run(branch: str, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    call = Call(SMALL, SCALE)
    if branch == "slc":
        out, lse = FLEX.selected(q, k, v, blocks, call)
    elif branch == "win":
        out, lse = FLEX.window(q, k, v, call)
    else:
        out, lse, _ = FLEX.compressed(q, k, v, call)
    assert lse is None
    assert out.dtype == q.dtype
    return out.double()


def check(branch: str, groups: int, seq_len: int, dtype: torch.dtype = torch.float32) -> None:
    q, k, v = inputs(branch, 3, 2, groups, seq_len, (32, 16), dtype)
    blocks = random_blocks(3, 2, seq_len)
    want = dense(branch, q, k, v, blocks)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run(branch, q, k, v, blocks), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("branch", BRANCHES)
@torch._dynamo.config.patch(assume_static_by_default=False)
def test_one_graph_serves_awkward_lengths(branch: str, request: pytest.FixtureRequest) -> None:
    """Inductor compiles the window, and all branches, for one length, in test_mods.py."""
    if branch != "win":
        request.getfixturevalue("eager_flex")
    for number, seq_len in enumerate(AWKWARD[branch]):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            check(branch, groups=2, seq_len=seq_len)


@pytest.mark.usefixtures("eager_flex")
@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_short_sequences(branch: str) -> None:
    for seq_len in SHORT:
        check(branch, groups=2, seq_len=seq_len)


@pytest.mark.usefixtures("eager_flex")
def test_few_tokens_in_bf16_and_a_group_that_is_not_a_power_of_two() -> None:
    check("slc", groups=6, seq_len=7, dtype=torch.bfloat16)


def test_a_few_lengths_compile_what_all_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager caller, such as one who reads prompts, meets another length at every call."""
    compiled: list[str] = []

    @functools.cache
    def count(branch: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
        def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            compiled.append(branch.__name__)
            return module.forward

        return torch.compile(branch, fullgraph=True, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(compilation, "compile_branch", count)
    layer = NativeSparseAttention(32, 4, 2, 16, config=SMALL, impl="flex").requires_grad_(False)
    for length in (600, 601, 610, 700, 777):  # of queries, of compressed keys, of tiles: each has to be seen to vary
        layer(torch.randn(1, length, 32))
    assert set(compiled) == {"_compressed", "_selected", "_window"}
    compiled.clear()
    for length in (602, 650, 800, 1000):
        layer(torch.randn(1, length, 32))
    assert not compiled


def test_cached_masks_serve_training_after_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs("win", 1, 1, 1, 33, (16, 16), torch.float32)
    masks: list[BlockMask] = []

    def record(*_: object, **__: object) -> Callable[..., BranchOutput]:
        def run(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, call: Call) -> BranchOutput:  # noqa: ARG001
            masks.append(mask)
            return BranchOutput(q, None)

        return run

    monkeypatch.setattr(flex, "compile_once", record)
    with torch.inference_mode():
        FLEX.window(q, k, v, Call(SMALL, SCALE))
    FLEX.window(q, k, v, Call(SMALL, SCALE))
    in_inference, in_training = masks
    assert in_training is in_inference
    assert not in_training.kv_indices.is_inference()


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cmp", "v_cmp", "k_win", "v_win"])
def test_flex_on_cpu_rejects_gradients(name: str) -> None:
    named = make_inputs(33, dtype=torch.float32).named()
    arguments = {key: x.detach().requires_grad_(key == name) for key, x in named.items()}
    with pytest.raises(ValueError, match=rf"^{name}: expected no gradient with impl='flex' on a CPU"):
        native_sparse_attention(**arguments, config=SMALL, impl="flex")


@pytest.mark.usefixtures("eager_flex")
def test_what_no_branch_reads_may_be_anything() -> None:
    x = make_inputs(72, dtype=torch.float32)
    read = {name: tensor.detach() for name, tensor in x.named().items()}
    unread: dict[str, Any] = {name: read[name].clone().requires_grad_() for name in ("k", "v", "k_cmp", "v_cmp")}
    arguments = read | unread
    out = native_sparse_attention(**arguments, config=SMALL, branches=("win",), impl="flex")
    expected = native_sparse_attention(**read, config=SMALL, branches=("win",), impl="sdpa")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("branch", BRANCHES)
def test_what_a_cpu_cannot_do_is_said(branch: str) -> None:
    q, k, v = inputs(branch, 1, 1, 1, 33, (16, 16), torch.float32)
    blocks = (torch.tensor([0, -1, -1, -1], dtype=torch.int32).repeat(1, 1, 33, 1),) if branch == "slc" else ()
    attention = {"cmp": compressed_attention, "slc": selected_attention, "win": sliding_window_attention}[branch]
    key = "k_cmp" if branch == "cmp" else "k"
    message = rf"^{key}: expected no gradient with impl='flex' on a CPU, where FlexAttention has no backward"
    with pytest.raises(ValueError, match=message):
        attention(q, k.requires_grad_(), v, *blocks, config=SMALL, impl="flex")
    message = r"^q: expected float32, bfloat16 or float16 with impl='flex', got torch.float64"
    with pytest.raises(ValueError, match=message):
        attention(*(x.double() for x in (q, k, v)), *blocks, config=SMALL, impl="flex")
