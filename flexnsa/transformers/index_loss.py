"""How far the scores of a released model's indexer are from its own attention, and the gradient, in linear memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexnsa.attention.selection_loss import compare, weigh
from flexnsa.attention.shares import grouped_products, queries_at_once
from flexnsa.transformers.released_indexers import Features, ReleasedIndexer, at_tokens


@dataclass(frozen=True, slots=True)
class Attention:
    """The dense attention of a layer at the queries ``q (B, Hq, m, Dk)`` of ``tokens (B, m)``, where -1 is no token.

    The ``mask (B or 1, 1, S, S)`` is true or 0 where a query may look; None: at all past tokens. The logits ``sinks
    (Hq,)`` take part in the softmax.
    """

    q: Tensor
    k: Tensor
    tokens: Tensor
    mask: Tensor | None
    scale: float
    sinks: Tensor | None

    def visible(self, part: slice) -> Tensor:
        """Return which keys some of the queries may see, bool ``(B, T, S)``."""
        tokens = self.tokens[:, part, None]
        if self.mask is None:
            return torch.arange(self.k.shape[2], device=tokens.device) <= tokens
        rows = at_tokens(self.mask[:, 0], self.tokens[:, part])
        return (rows if rows.dtype == torch.bool else rows == 0) & (tokens >= 0)

    def probs(self, part: slice, visible: Tensor, groups: int) -> Tensor:
        """Return the softmax over all visible keys, a mean over each of some groups of heads, ``(B, groups, T, S)``."""
        products = grouped_products(self.q[:, :, part], self.k, self.scale).flatten(1, 2)
        products = products.masked_fill(~visible[:, None], -torch.inf)
        lse = products.logsumexp(-1, keepdim=True)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.to(lse.dtype)[:, None, None])
        probs = (products - lse.masked_fill(lse == -torch.inf, 0)).exp()
        return torch.unflatten(probs, 1, (groups, -1)).mean(2)


class Sums(NamedTuple):
    """Sums over queries, scalars: of weighted divergences, those of a uniform guess, and weights to divide both by.

    ``found`` is the true mass of the chosen units, and ``best`` that of the best as many, where there is a choice.
    """

    kl: Tensor
    uniform: Tensor
    weight: Tensor
    found: Tensor
    best: Tensor


@torch.no_grad()
def differentiate_index(
    released: ReleasedIndexer,
    features: Features,
    attention: Attention,
    choice: Tensor | None,
    *,
    among_chosen: bool,
    by_mass: bool,
    gradient: bool,
) -> tuple[Sums, list[Tensor]]:
    """Sum the divergences of units' scores from their true shares, and differentiate the sum, in chunks of queries.

    Both are distributions over the units that are free, or over those that the model chooses of them. Its own
    ``choice (B, groups, m, n)`` decides, or without one the best scores, as ties and rounding may differ.

    Returns:
        The sums, and the gradients of ``kl`` in the features.
    """
    wide = torch.promote_types(features.q.dtype, torch.float32)
    sums = torch.zeros(5, dtype=wide, device=features.q.device)
    grads = [torch.zeros_like(x, dtype=wide) for x in features.tensors] if gradient else []
    chunk = queries_at_once(max(attention.q, features.q, key=lambda x: x.shape[1]), attention.k)
    for at in range(0, attention.tokens.shape[1], chunk):
        part = slice(at, at + chunk)
        visible = attention.visible(part)
        free = released.free(visible, attention.tokens[:, part])[:, None]
        true = released.shares(attention.probs(part, visible, released.groups)) * free
        leaves = features.take(part)
        with torch.set_grad_enabled(gradient):
            scores = released.scores(leaves, visible)
        chosen = released.best(scores.detach(), free) if choice is None else released.chosen(choice[:, :, part], free)
        kept = chosen if among_chosen else free.expand_as(chosen)
        compared = compare(true.log(), scores.detach(), kept)
        weights = weigh(compared.mass, by_mass)
        of_uniform = torch.xlogy(compared.true, compared.true).sum(-1) + kept.sum(-1).clamp_min(1).log()
        must_choose = free.sum(-1) > released.num_chosen
        best = true.topk(min(released.num_chosen, true.shape[-1])).values.sum(-1)
        parts = compared.kl * weights, of_uniform * weights, weights, (true * chosen).sum(-1) * must_choose
        sums += torch.stack([x.sum() for x in (*parts, best * must_choose)])
        if gradient:
            slope = (compared.score - compared.true) * weights[..., None]
            dq, dk, *others = torch.autograd.grad(scores, leaves.tensors, slope.to(scores.dtype))
            grads[1] += dk
            for total, made in zip((grads[0], *grads[2:]), (dq, *others), strict=True):
                total[:, :, part] = made
    return Sums(*sums), grads
