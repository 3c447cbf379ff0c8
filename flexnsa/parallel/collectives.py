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


def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum the ``x (size * n, ...)`` of all ranks, of which the first gets the first ``n``, and so on: ``(n, ...)``.

    In backward each rank receives the gradients of all ranks.
    """
    return _Scatter.apply(x, size, group)


def total(x: Tensor, group: str) -> Tensor:
    """Sum the x of all ranks, on each of them.

    In backward the gradient is that of the rank's own x. It is not summed, as all ranks go on from the same sum.
    """
    return _Total.apply(x, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.size, ctx.group = size, group
        return _concatenated(x, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed_shares(gradient, ctx.size, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.size, ctx.group = size, group
        return _summed_shares(x, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _concatenated(gradient, ctx.size, ctx.group), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return gradient, None


def _concatenated(x: Tensor, size: int, group: str) -> Tensor:
    return wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))


def _summed_shares(x: Tensor, size: int, group: str) -> Tensor:
    return wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
