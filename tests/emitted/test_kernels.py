"""The sm_90 kernels that Inductor generates, forward and backward: right in an interpreter, and free of spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cubin import compile_all  # pyright: ignore[reportMissingImports]
from emit import emit  # pyright: ignore[reportMissingImports]
from interpret import interpreted  # pyright: ignore[reportMissingImports]
from torch import Tensor

from flexnsa.attention.implementations import FLEX
from flexnsa.attention.seam import Call
from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed

SMALL = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=2,
    num_local_blocks=1,
    window_size=24,
)
BRANCHES = ("cmp", "slc", "win")
CASES = [("slc", groups, dtype) for groups in (1, 4, 6, 16) for dtype in (torch.float32, torch.bfloat16)]
CASES += [(branch, groups, torch.float32) for branch in ("cmp", "win") for groups in (1, 6)]
CASES += [(branch, groups, torch.bfloat16) for branch in ("cmp", "win") for groups in (4, 16)]


def length_of(branch: str, groups: int) -> int:
    """Choose 40 selecting tokens, of which a copy holds 32; else two tiles of 128 tokens, or one if heads are many."""
    return 40 if branch == "slc" else 150 if groups < 16 else 60


def attention(branch: str, config: NSAConfig, scale: float) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        call = Call(config, scale)
        if blocks is not None:
            return FLEX.selected(q, k, v, blocks, call)
        attended = FLEX.window(q, k, v, call) if branch == "win" else FLEX.compressed(q, k, v, call)
        return attended.out, attended.lse

    return run


def arguments(
    branch: str, config: NSAConfig, groups: int, seq_len: int, dims: tuple[int, int], dtype: torch.dtype, heads: int = 1
) -> tuple[Tensor, ...]:
    num_keys = num_compressed(seq_len, config) if branch == "cmp" else seq_len
    shapes = (heads * groups, seq_len, dims[0]), (heads, num_keys, dims[0]), (heads, num_keys, dims[1])
    batch = 2 if groups == 1 else 1
    q, k, v = (torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes)
    if branch != "slc":
        return q, k, v
    # Every query takes block 0 and its own, so more queries choose block 0 than one copy of it serves.
    own = torch.arange(seq_len, dtype=torch.int32) // config.select_block_size
    blocks = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1)], -1)
    blocks = torch.nn.functional.pad(blocks, (0, config.num_selected_blocks - 2), value=-1)
    return q, k, v, blocks.expand(batch, heads, -1, -1).contiguous()


def visible(branch: str, q: Tensor, k: Tensor, config: NSAConfig) -> Tensor:
    t, s = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if branch == "cmp":
        return s * config.compress_stride + config.compress_block_size - 1 <= t
    if branch == "win":
        return (s <= t) & (s > t - config.window_size)
    block, size = s // config.select_block_size, config.select_block_size
    return ((block == 0) | (block == t // size)) & (s <= t)


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with a boolean mask; rows without a key give 0 and, to keep it finite, lse 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    some = keep.any(-1, keepdim=True)
    scores = (scale * q @ k.mT).masked_fill(~keep, -torch.inf).masked_fill(~some, 0.0)
    return scores.softmax(-1).masked_fill(~keep, 0.0) @ v, scores.logsumexp(-1) * some[:, 0]


@pytest.mark.parametrize(("branch", "groups", "dtype"), CASES)
def test_kernels_compute_attention_and_its_gradients(branch: str, groups: int, dtype: torch.dtype) -> None:
    config, scale = SMALL, 0.3

    def make() -> tuple[Tensor, ...]:
        return arguments(branch, config, groups, length_of(branch, groups), (32, 16), dtype)

    module = emit(attention(branch, config, scale), make)
    inputs = make()
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    keep = visible(branch, exact[0], exact[1], config)

    out, lse = interpreted(module.check())(*inputs)
    empty = ~keep.any(-1)
    assert torch.equal(lse == -torch.inf, empty.expand_as(lse))
    got = (out, lse.masked_fill(empty, 0.0))
    want = dense(exact[0], exact[1], exact[2], keep, scale)
    seeds = [torch.randn_like(x) for x in got]
    got += torch.autograd.grad(got, inputs[:3], seeds)
    want += torch.autograd.grad(want, exact, [x.double() for x in seeds])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("branch", BRANCHES)
def test_kernels_compile_without_spills(branch: str, dim: int, capsys: pytest.CaptureFixture[str]) -> None:
    config, groups = NSAConfig(), 16
    module = emit(
        attention(branch, config, dim**-0.5),
        lambda: arguments(branch, config, groups, 4096, (dim, dim), torch.bfloat16, heads=4),
    )
    kernels = [kernel for kernel in module.check().kernels if kernel.kind == "template"]
    resources = compile_all(kernels)
    with capsys.disabled():
        for r in resources:
            launch = f"{r.config['num_warps']} warps, {r.config['num_stages']} stages"
            size = f"{r.registers} registers, {r.shared} bytes shared, {r.stack} spilled"
            print(f"\n{branch} D={dim} {r.graph}: {launch}, {size}, {r.mma}", end="")
    assert [r.graph for r in resources] == ["forward", "backward"]
    assert all(r.stack == 0 for r in resources)


def test_one_graph_serves_every_length() -> None:
    module = emit(
        attention("slc", SMALL, 0.3),
        lambda: arguments("slc", SMALL, 4, 1000, (32, 16), torch.bfloat16),
        dynamic=True,
        more_args_fns=[lambda n=n: arguments("slc", SMALL, 4, n, (32, 16), torch.bfloat16) for n in (512, 3000, 4096)],
    )
    assert module.check().source("backward") is not None
