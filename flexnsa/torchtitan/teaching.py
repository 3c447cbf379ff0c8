"""The selection loss of a layer: its gradient joins backward in the layer, because pipeline stages share no loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexnsa.layers.indexer import SelectionLoss
from flexnsa.torchtitan.options import Options


class Teaching:
    """The selection loss of one layer: its gradient in each step, and its sums for the log.

    The gradient is that of ``weight * mean``, a mean over the sampled queries of all sequences and heads of the step. A
    query that selects freely among blocks of little mass counts little in it, see :func:`flexnsa.selection_loss`. So
    each sequence adds its own part, whatever ranks, microbatches and pipeline stages there are. All sequences of a step
    sample the same queries, because a layer does not know which sequences it has.

    Args:
        options: of the layer.
        num_heads: key heads of the whole layer, over all ranks.
        sequences: in one step, over all ranks.
        step: int64 ``()``, on the layer's device; the run's metrics set it.
    """

    def __init__(self, options: Options, *, num_heads: int, sequences: int, step: Tensor) -> None:
        self.options, self.num_heads, self.sequences, self.step = options, num_heads, sequences, step
        # Its gradient is the sum of divergences and their weight, so backward counts each once, whatever runs again.
        self.tally = torch.zeros(2, device=step.device, requires_grad=True)
        self.tally.grad = torch.zeros_like(self.tally)

    def selection(self, x: Tensor) -> SelectionLoss:
        """Return a loss for one forward pass of ``x (B, S, dim)``."""
        same = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        num_queries, seed = self.options.num_queries, self.options.seed
        return SelectionLoss(seed=seed, step=self.step, sequence_ids=same, num_queries=num_queries)

    def attach(self, out: Tensor, selection: SelectionLoss, seq_len: int) -> Tensor:
        """Return ``out`` with the gradient of the loss attached, of sequences of ``seq_len`` tokens."""
        (loss,), (weight,) = selection.sums, selection.weights
        count = self.sequences * self.num_heads * min(seq_len, self.options.num_queries)
        parts = torch.stack((loss.detach(), weight))
        return _Attach.apply(out, loss * (self.options.selection_loss_weight / count), self.tally, parts)

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return the sum of divergences and their weight ``(2,)`` since the last time, of this rank's heads."""
        counted = self.tally.grad
        assert counted is not None
        taken = counted.clone()
        counted.zero_()
        return taken


class _Attach(torch.autograd.Function):
    """Add a loss to whatever loss an output leads to, and ``parts`` to the gradient of a tally."""

    @staticmethod
    def forward(out: Tensor, loss: Tensor, tally: Tensor, parts: Tensor) -> Tensor:  # noqa: ARG004
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[3])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (parts,) = ctx.saved_tensors
        return gradient, torch.ones_like(parts[0]), parts, None
