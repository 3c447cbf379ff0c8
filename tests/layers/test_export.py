"""The layer as an exported program: one for every length."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from flexnsa import NativeSparseAttention
from tests.support.inputs import SMALL


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_one_program_serves_every_length(strict: bool) -> None:
    """Checks of what the exporter cannot prove, such as ``d * (S // d) <= S``, are left to the program.

    Fewer than two compressed tokens, S < l + d, would be a program of its own: the exporter takes sizes 0 and 1 for
    constants.
    """
    layer = NativeSparseAttention(32, 4, 2, 8, config=SMALL, impl="sdpa").eval()
    lengths = ({1: Dim("S", min=12, max=512)},)
    exported = export(
        layer,
        (torch.randn(1, 100, 32),),
        dynamic_shapes=lengths,
        strict=strict,
        prefer_deferred_runtime_asserts_over_guards=True,
    ).module()
    for length in (12, 13, 16, 17, 33, 512):
        x = torch.randn(1, length, 32)
        torch.testing.assert_close(exported(x), layer(x))
