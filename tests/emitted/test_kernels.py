"""The sm_90 kernels that Inductor generates: right in an interpreter, free of spills, and in 64 bits for long rows."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa.attention.flex import branches
from flexnsa.attention.interface import Call
from flexnsa.config import NSAConfig
from flexnsa.layers.projection import project_together
from tests.emitted.calls import BRANCHES, TWO_BLOCKS, arguments, assert_agree, attention
from tests.emitted.emit import emit
from tests.emitted.interpreted import interpreted
from tests.emitted.machine_code import resources
from tests.support.dense import dense_attention, visible_keys

CASES = [(branch, groups, torch.float32) for branch, groups in (("cmp", 6), ("slc", 1), ("slc", 6), ("win", 1))]
CASES += [(branch, 16, torch.bfloat16) for branch in BRANCHES]


def length_of(branch: str, groups: int) -> int:
    """Choose 40 selecting tokens, of which a copy holds 32; else two tiles of 128 tokens, or one of several heads."""
    return 40 if branch == "slc" else 150 if groups == 1 else 60


@pytest.mark.parametrize(("branch", "groups", "dtype"), CASES)
def test_kernels_compute_attention_and_its_gradients(branch: str, groups: int, dtype: torch.dtype) -> None:
    config, scale = TWO_BLOCKS, 0.3

    def make() -> tuple[Tensor, ...]:
        return arguments(branch, config, groups, length_of(branch, groups), (32, 16), dtype)

    module = emit(attention(branch, config, scale), make)
    inputs = make()
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    keep = visible_keys(branch, (exact[0].shape[2],), config, *inputs[3:])

    got, want = interpreted(module)(*inputs), dense_attention(exact[0], exact[1], exact[2], keep, scale)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_agree(got, want, inputs[:3], exact, "dq", "dk", "dv", tolerance=tolerance)


@pytest.mark.parametrize("branch", BRANCHES)
def test_kernels_of_narrow_heads_compile_without_spills(branch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of 128 numbers do, by :mod:`test_architectures`."""
    config, groups, dim = NSAConfig(), 16, 64
    module = emit(
        attention(branch, config, dim**-0.5),
        lambda: arguments(branch, config, groups, 4096, (dim, dim), torch.bfloat16, heads=4),
    )
    kernels = [kernel for kernel in module.kernels if kernel.is_template]
    assert [kernel.direction for kernel in kernels] == ["forward", "backward"]
    for needed in map(resources, kernels):
        with capsys.disabled():
            print(f"\n{branch} D={dim} {needed}", end="")
        assert needed.spilled == 0
    if branch == "slc":  # one kernel tells
        assert resources(kernels[0], maxnreg=96).spilled, "a spill is not counted"


def test_one_graph_serves_every_length() -> None:
    module = emit(
        attention("slc", TWO_BLOCKS, 0.3),
        lambda: arguments("slc", TWO_BLOCKS, 4, 1000, (32, 16), torch.bfloat16),
        dynamic=True,
        others=[lambda n=n: arguments("slc", TWO_BLOCKS, 4, n, (32, 16), torch.bfloat16) for n in (512, 3000, 4096)],
    )
    assert module.source("backward")


@pytest.mark.parametrize("count", [2, 5, 6])
def test_each_gradient_is_written_straight_into_the_joint_one(count: int) -> None:
    """One kernel for all would compute the gradients of all pieces for every element."""

    def run(x: Tensor, weights: list[Tensor], factors: list[Tensor]) -> Tensor:
        pieces = project_together(x, weights)
        return torch.stack([(p * f).sin().sum() for p, f in zip(pieces, factors, strict=True)]).sum()

    def make() -> tuple[Any, ...]:
        weights = [torch.randn(100, 64, requires_grad=True) for _ in range(count)]
        return torch.randn(2048, 64, requires_grad=True), weights, [torch.randn(2048, 100) for _ in range(count)]

    kernels = [kernel for kernel in emit(run, make).kernels if kernel.direction == "backward"]
    assert max(kernel.source.count("*fp32") for kernel in kernels) <= 4  # the output, and what one gradient reads


CONFIG, LENGTH, DIM = NSAConfig(), 2**19, 128
SCALE = DIM**-0.5


def tensors(branch: str, *, by_token: bool = False) -> tuple[Tensor, ...]:
    """Make 64 heads for half a million tokens, 2^32 numbers; by token as a layer lays them out."""
    q, *others = arguments(branch, CONFIG, 16, LENGTH, (DIM, DIM), torch.bfloat16, heads=4)
    if by_token:
        q = torch.empty(1, LENGTH, 64, DIM, dtype=q.dtype, requires_grad=True).transpose(1, 2)
    return q, *others


@pytest.mark.parametrize(("branch", "by_token"), [*((branch, True) for branch in BRANCHES), ("slc", False)])
def test_kernels_count_far_rows_in_64_bits(branch: str, by_token: bool) -> None:
    emitted = emit(attention(branch, CONFIG, SCALE), partial(tensors, branch, by_token=by_token))
    templates = [kernel for kernel in emitted.kernels if kernel.is_template]
    assert [kernel.direction for kernel in templates] == ["forward", "backward"]
    for kernel in templates:
        assert set(re.findall(r"INDEX_DTYPE : tl.constexpr = (\S+)", kernel.source)) == {"tl.int64"}
        # Rows that a kernel finds in a list are 32-bit integers, which it multiplies with the stride between rows.
        for strides in re.findall(r"stride_\w+, stride_\w+, stride_\w+, stride_\w+ = (.+)", kernel.source):
            assert int(strides.split(", ")[2]) * LENGTH * 16 < 2**31


def test_heads_of_more_numbers_are_refused_by_name() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        q, k, v, chosen = tensors("slc")
        call = Call(CONFIG, SCALE)
        with pytest.raises(ValueError, match=r"q: expected fewer than 2\^31 numbers in one head .* got 33554432 rows"):
            branches.selected(q, k[:, :1], v[:, :1], chosen[:, :1], call)
