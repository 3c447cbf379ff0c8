"""The selection loss of a layer whose heads or tokens are spread over ranks: on every rank, that of the whole layer.

Every rank compares a part, and the sums and weights are added. In backward each rank differentiates its own part, so
gradients are those of one process once they are summed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.sampling import QuerySample, Sample
from flexnsa.masks.positions import Positions
from flexnsa.parallel.collectives import scatter, total
from flexnsa.parallel.shared_rows import SharingRanks


@dataclass(frozen=True, slots=True)
class OverHeads:
    """Ranks with a part of the heads each; see :class:`flexnsa.layers.forward.LossOverRanks`."""

    group: str

    def share(self, sample: QuerySample, local: Positions) -> QuerySample:  # noqa: ARG002
        """Return the sample: every rank compares all queries of its own heads."""
        return sample

    def add(self, loss: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over all heads."""
        loss, weight = total(torch.stack((loss, weight)), self.group).unbind()
        return loss, weight.detach()


@dataclass(frozen=True, slots=True)
class OverTokens:
    """Ranks with a part of the tokens each; see :class:`flexnsa.layers.forward.LossOverRanks`.

    All keys of the selected branch and of the scorer are on every rank anyway.
    """

    ranks: SharingRanks

    def share(self, sample: QuerySample, local: Positions) -> QuerySample:
        """Return an equal share of the sampled queries, wherever these are."""
        return _Share.of(sample.tokens, local, self.ranks)

    def add(self, loss: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over all queries."""
        return OverHeads(self.ranks.group).add(loss, weight)


class _Share(NamedTuple):
    """The sampled queries of this rank, and where they are.

    Args:
        tokens: int64 ``(B, m / R)``, tokens of the whole sequence.
        ranks: that share the sampled ones.
        at: int64 ``(B, m)``, indices of all sampled queries among this rank's own, where these have them.
        elsewhere: bool ``(B, m)``, whether another rank has them.
    """

    tokens: Tensor
    ranks: SharingRanks
    at: Tensor
    elsewhere: Tensor

    @classmethod
    def of(cls, tokens: Tensor, local: Positions, ranks: SharingRanks) -> _Share:
        """Share out ``tokens (B, m)``, given the positions of this rank's queries."""
        # What fills the shares up stands before the sequence: a query that sees no key weighs nothing.
        tokens = F.pad(tokens, (-tokens.shape[1] % ranks.size, 0), value=-1)
        token = local.token[0]
        at = torch.searchsorted(token, tokens.to(token.dtype)).clamp_max(len(token) - 1)
        return cls(tokens.chunk(ranks.size, 1)[ranks.rank], ranks, at, token[at] != tokens)

    def take(self, x: Tensor) -> Tensor:
        """Return the sampled queries that are among this rank's own ``x (B or 1, H, T, D)``, and any for the rest."""
        return Sample(self.at).take(x)

    def compared(self, x: Tensor) -> Tensor:
        """Exchange what :meth:`take` returned for the queries of this share."""
        queries = x.masked_fill(self.elsewhere[:, None, :, None], 0)
        # Of each query one rank has numbers, all others 0.
        return scatter(torch.cat(queries.chunk(self.ranks.size, 2)), self.ranks.size, self.ranks.group)

    def positions(self, whole: Positions) -> Positions:
        """Locate the queries of this share, given the positions of this rank's own."""
        located = Positions.of_queries(self.tokens)
        if whole.aligned:
            return located
        starts = torch.stack((whole.start, whole.cmp_start), -1)[:, None]
        start, cmp_start = self.compared(self.take(starts))[:, 0].unbind(-1)
        return replace(located, start=start, cmp_start=cmp_start, aligned=False)
