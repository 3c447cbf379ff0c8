"""Losses that a model carries with what it returns, so that the backward of any trainer meets their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Attached(torch.autograd.Function):
    """The first argument, with the gradient of the second."""

    @staticmethod
    def forward(_: Any, x: Tensor, loss: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        """Return the first."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        """Give the second a gradient of 1."""
        return grad, grad.new_ones(())


class Once(torch.autograd.Function):
    """The loss of a pass, whose gradient passes once: to the backward, or the part of one, that comes first.

    What was computed last is differentiated first, so a loss that was asked for precedes what outputs carry.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, one_pass: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remember the pass, whose ``taught`` says whether a backward has met its gradient."""
        ctx.one_pass = one_pass
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let the first gradient through."""
        first, ctx.one_pass.taught = not ctx.one_pass.taught, True
        return grad if first else torch.zeros_like(grad), None


class WithGradient(torch.autograd.Function):
    """A loss whose gradients in some parameters are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        """Keep the gradients."""
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scale them."""
        return None, None, *(grad.to(x.dtype) * x for x in ctx.saved_tensors)


@contextmanager
def graph_of_its_own() -> Iterator[None]:
    """Record a graph in forward, also where activation checkpointing records none, and keep what it saves.

    Of parameters it keeps a copy, because FSDP frees them after their layer. All else is detached: an operation that
    keeps its own output would hold itself, and never be freed.
    """

    def keep(x: Tensor) -> Tensor:
        return x.detach().clone() if x.is_leaf and x.requires_grad else x.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield
