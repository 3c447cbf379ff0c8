"""The selection loss of one training step, over all parts of its batch and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from flexnsa.layers.indexer import SelectionLoss
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.parallel.ranks import Ranks


class Teaching:
    """Collects the selection losses of a step, and divides their gradients by the weight of all sampled queries.

    That weight is known only when the last part has been computed. So sums are differentiated, and the gradients of
    each indexer, to which nothing else contributes, are divided afterwards. Those of an indexer that several layers
    teach are divided by the mean of their weights: its loss is the sum over these layers, among which a query weighs
    the same in all.

    Args:
        model: whose indexers learn, if it has any.
        weight: factor on the loss.
        seed: of the run.
        step: of the run, int64 ``()``; an int would be compiled anew in each step.
        sequence_ids: int ``(B,)``, the indices of this rank's sequences in the batch of the step.
        wait: indexers learn nothing: the step is of a dense stage.
    """

    def __init__(
        self, model: DecoderLM, *, weight: float, seed: int, step: Tensor, sequence_ids: Tensor, wait: bool = False
    ) -> None:
        indexers = model.indexers_by_layer()
        self.indexers, self._waiting = ([], indexers) if wait else (indexers, [])
        self.weight, self.seed, self.sequence_ids = weight, seed, sequence_ids
        self.step = step
        self._sums = torch.zeros(2, len(self.indexers), dtype=torch.float64, device=sequence_ids.device)

    def selection(self, rows: slice) -> SelectionLoss | None:
        """Return the loss that a forward pass of these sequences adds to; None without indexers that learn."""
        if not self.indexers:
            return None
        return SelectionLoss(seed=self.seed, step=self.step, sequence_ids=self.sequence_ids[rows])

    def summed(self, selection: SelectionLoss | None) -> Tensor | float:
        """Count what a forward pass added, and return what to differentiate."""
        if selection is None or not selection.sums:
            return 0.0
        sums = torch.stack(selection.sums)
        self._sums += torch.stack((sums.detach(), torch.stack(selection.weights))).double()
        return self.weight * sums.sum()

    def finish(self, ranks: Ranks, loss: Tensor) -> Tensor:
        """Divide the gradients; return the sums over ranks of ``loss ()`` and, if indexers learn, theirs, in fp64."""
        for parameter in (each for indexer in self._waiting for each in indexer.parameters()):
            parameter.grad = None  # of 0, with which weights would decay
        own = self._sums.flatten() / ranks.context_parallel  # each rank that shares tokens has the sums of all
        totals = ranks.totals(torch.cat((loss.double().view(1), own)))
        if not self.indexers:
            return totals
        sums, weights = totals[1:].view(2, -1)
        weights = weights.where(weights > 0, 1)
        for indexer in dict.fromkeys(self.indexers):
            own = [weight for weight, each in zip(weights, self.indexers, strict=True) if each is indexer]
            for parameter in indexer.parameters():
                if parameter.grad is not None:
                    parameter.grad /= torch.stack(own).mean()
        return torch.stack((totals[0], (sums / weights).sum()))
