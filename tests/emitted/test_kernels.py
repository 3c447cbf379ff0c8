"""The sm_90 kernels that Inductor generates, forward and backward: right in an interpreter, and free of spills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flexnsa.attention.implementations import FLEX
from flexnsa.attention.seam import Call
from flexnsa.config import NSAConfig
from flexnsa.geometry import num_compressed
from tests.support.dense import dense_attention, visible_keys
from tests.support.inputs import SMALL

TWO_BLOCKS = replace(SMALL, num_selected_blocks=2, num_local_blocks=1)
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


@pytest.mark.parametrize(("branch", "groups", "dtype"), CASES)
def test_kernels_compute_attention_and_its_gradients(
    branch: str, groups: int, dtype: torch.dtype, toolkit: SimpleNamespace
) -> None:
    config, scale = TWO_BLOCKS, 0.3

    def make() -> tuple[Tensor, ...]:
        return arguments(branch, config, groups, length_of(branch, groups), (32, 16), dtype)

    module = toolkit.emit(attention(branch, config, scale), make)
    inputs = make()
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    keep = visible_keys(branch, (exact[0].shape[2],), config, *inputs[3:])

    out, lse = toolkit.interpreted(module.check())(*inputs)
    true_out, true_lse = dense_attention(exact[0], exact[1], exact[2], keep, scale)
    empty = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    got, want = (out, lse.masked_fill(empty, 0.0)), (true_out, true_lse.masked_fill(empty, 0.0))
    seeds = [torch.randn_like(x) for x in got]
    got += torch.autograd.grad(got, inputs[:3], seeds)
    want += torch.autograd.grad(want, exact, [x.double() for x in seeds])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("branch", BRANCHES)
def test_kernels_compile_without_spills(
    branch: str, dim: int, capsys: pytest.CaptureFixture[str], toolkit: SimpleNamespace
) -> None:
    config, groups = NSAConfig(), 16
    module = toolkit.emit(
        attention(branch, config, dim**-0.5),
        lambda: arguments(branch, config, groups, 4096, (dim, dim), torch.bfloat16, heads=4),
    )
    kernels = [kernel for kernel in module.check().kernels if kernel.kind == "template"]
    resources = toolkit.compile_all(kernels)
    with capsys.disabled():
        for r in resources:
            launch = f"{r.config['num_warps']} warps, {r.config['num_stages']} stages"
            size = f"{r.registers} registers, {r.shared} bytes shared, {r.stack} spilled"
            print(f"\n{branch} D={dim} {r.graph}: {launch}, {size}, {r.mma}", end="")
    assert [r.graph for r in resources] == ["forward", "backward"]
    assert all(r.stack == 0 for r in resources)


def test_one_graph_serves_every_length(toolkit: SimpleNamespace) -> None:
    module = toolkit.emit(
        attention("slc", TWO_BLOCKS, 0.3),
        lambda: arguments("slc", TWO_BLOCKS, 4, 1000, (32, 16), torch.bfloat16),
        dynamic=True,
        more_args_fns=[
            lambda n=n: arguments("slc", TWO_BLOCKS, 4, n, (32, 16), torch.bfloat16) for n in (512, 3000, 4096)
        ],
    )
    assert module.check().source("backward") is not None
