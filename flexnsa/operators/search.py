"""Search in sorted rows, which Inductor does not compile."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.operators.opaque import opaque_operator


@opaque_operator("searchsorted")
def searchsorted(ordered: Tensor, values: Tensor, right: bool = False) -> Tensor:
    """Return :func:`torch.searchsorted` in int32; with symbolic sizes Inductor of torch 2.11 fails at it on a GPU."""
    return torch.searchsorted(ordered, values, right=right, out_int32=True)


searchsorted.register_fake(searchsorted.function)
