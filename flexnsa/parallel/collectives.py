"""Collectives that have a gradient and stay in the graph of ``torch.compile``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate the ``x (n, ...)`` of ``size`` ranks, ``(size * n, ...)``, on each of them.

    In backward each rank receives the sum of all ranks' gradients of its own x. ``group`` names a process group.
    """
    return _Gather.apply(x, size, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int, group: str) -> Tensor:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
        return wait_tensor(gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.size, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = torch.ops._c10d_functional.reduce_scatter_tensor(gradient.contiguous(), "sum", ctx.size, ctx.group)
        return wait_tensor(own), None, None
