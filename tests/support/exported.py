"""Exported programs that serve every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export

LENGTHS = (64, 79, 80, 1000)

Inputs = Callable[[int, int], dict[str, Any]]
"""``(B, S)`` to keyword arguments, tensors ``(B, S, ...)``."""


@torch.no_grad()
def assert_one_program_serves_all(
    module: nn.Module, inputs: Inputs, *, any_batch: bool = True, strict: bool = False
) -> None:
    """Export the module for a range of lengths, of which nothing else is asked, and compare what it returns."""
    sizes = {1: Dim("S", min=min(LENGTHS), max=4096)} | ({0: Dim("B", min=2, max=8)} if any_batch else {})
    example = inputs(3 if any_batch else 1, 100)
    dims = dict.fromkeys(example, sizes)
    exported = export(module, (), kwargs=example, dynamic_shapes=dims, strict=strict).module()
    for length in LENGTHS:
        given = inputs(2 if any_batch else 1, length)
        assert torch.equal(_tensor(exported(**given)), _tensor(module(**given)))


def _tensor(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits
