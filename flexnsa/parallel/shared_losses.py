"""The selection loss of a layer whose heads or tokens are spread over ranks: on every rank, that of the whole layer.

Every rank compares a part, and the sums and weights are added. In backward each rank differentiates its own part, so
gradients are those of one process once they are summed over ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.attention.seam import Call, Divergence, Scorer
from flexnsa.parallel.collectives import scatter, total
from flexnsa.parallel.shared_rows import SharingRanks
from flexnsa.positions import Positions, positions_of


def over_heads(divergence: Divergence, *, group: str) -> Divergence:
    """Sum the divergences of the heads of all ranks."""

    def compare(
        q: Tensor, k: Tensor, scorer: Scorer, tokens: Tensor, call: Call, query_weights: str
    ) -> tuple[Tensor, Tensor]:
        return _added(divergence(q, k, scorer, tokens, call, query_weights), group)

    return compare


def over_tokens(divergence: Divergence, *, ranks: SharingRanks) -> Divergence:
    """Sum the divergences of the sampled queries of all ranks, which come to an equal share of them on each.

    All keys of the selected branch and of the scorer are on every rank anyway.
    """

    def compare(
        q: Tensor, k: Tensor, scorer: Scorer, tokens: Tensor, call: Call, query_weights: str
    ) -> tuple[Tensor, Tensor]:
        share = _Share.of(tokens, positions_of(q, call.positions), ranks)
        among = {"positions": Positions.of_queries(share.tokens)}
        scorer = Scorer(share.take(scorer.q), scorer.k, replace(scorer.call, **among))
        every = torch.arange(share.tokens.shape[1], device=tokens.device).expand_as(share.tokens)
        q = share.take(q.detach())
        return _added(divergence(q, k, scorer, every, replace(call, **among), query_weights), ranks.group)

    return compare


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
    def of(cls, tokens: Tensor, own: Positions, ranks: SharingRanks) -> _Share:
        """Share out ``tokens (B, m)``, given the positions of this rank's queries."""
        # What fills the shares up stands before the sequence: a query that sees no key weighs nothing.
        tokens = F.pad(tokens, (-tokens.shape[1] % ranks.size, 0), value=-1)
        token = own.token[0]
        at = torch.searchsorted(token, tokens.to(token.dtype)).clamp_max(len(token) - 1)
        return cls(tokens.chunk(ranks.size, 1)[ranks.rank], ranks, at, token[at] != tokens)

    def take(self, x: Tensor) -> Tensor:
        """Return the queries of this share, given this rank's own ``x (B, H, T, D)``."""
        index = self.at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        found = x.gather(2, index).masked_fill(self.elsewhere[:, None, :, None], 0)
        # Of each query one rank has numbers, all others 0.
        return scatter(torch.cat(found.chunk(self.ranks.size, 2)), self.ranks.size, self.ranks.group)


def _added(parts: tuple[Tensor, Tensor], group: str) -> tuple[Tensor, Tensor]:
    loss, weight = total(torch.stack(parts), group).unbind()
    return loss, weight.detach()
