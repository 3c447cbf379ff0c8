"""Sequences so long that 32 bits do not count their numbers: kernels count in 64, and what cannot be is refused."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexnsa.attention.flex import branches
from flexnsa.attention.interface import Call
from flexnsa.config import NSAConfig
from tests.emitted.calls import BRANCHES, arguments, attention
from tests.emitted.emit import emit

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
