"""Search in sorted rows, for compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.operators.opaque import opaque_operator


@opaque_operator("searchsorted")
def searchsorted(ordered: Tensor, values: Tensor) -> Tensor:
    """Return :func:`torch.searchsorted` of ``(B, N)`` and ``(B, M)``: int32 ``(B, M)``, the first place not below.

    On a GPU Inductor of torch 2.11 writes no valid kernel for it where rows are expanded and sizes symbolic.
    """
    return torch.searchsorted(ordered, values, out_int32=True)


searchsorted.register_fake(searchsorted.function)
