"""What the indexers of released models compare, with a gradient: queries, keys, and how a score becomes that of a unit.

A unit is what an indexer ranks: a token (DSA), a block of tokens (MSA), or a run of tokens from any one on (QSA), so
that the runs of a packed document can begin wherever it does. Their own modules make the features, adapters included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Features(NamedTuple):
    """Index queries of some tokens ``(B, H, m, D)``, index keys ``(B, 1, S, D)``, factors on heads ``(B, H, m)``."""

    q: Tensor
    k: Tensor
    weights: Tensor | None = None

    def take(self, part: slice) -> Features:
        """Return some of the queries, and all keys, as leaves of a graph of their own."""
        weights = None if self.weights is None else self.weights[:, :, part].detach().requires_grad_()
        return Features(self.q[:, :, part].detach().requires_grad_(), self.k.detach().requires_grad_(), weights)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [x for x in self if x is not None]


class ReleasedIndexer(ABC):
    """How the indexer of a layer, ``module``, ranks units of ``size`` tokens for ``groups`` choices of each query."""

    groups, size = 1, 1
    num_chosen: int
    """Units that a query chooses, besides those that are forced."""
    any_start = True
    """Whether a document may begin behind other tokens of its row."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @abstractmethod
    def features(self, given: dict[str, Any], tokens: Tensor) -> Features:
        """Compute the features of queries at ``tokens (B, m)``, from what the indexer's forward was given."""

    @abstractmethod
    def scores(self, features: Features, visible: Tensor) -> Tensor:
        """Score units, ``(B, groups, m, U)``, fp32 or wider; queries may look at ``visible (B, m, S)`` keys."""

    def free(self, visible: Tensor, tokens: Tensor) -> Tensor:  # noqa: ARG002
        """Return the units that compete for each query, bool ``(B, m, U)``."""
        return visible

    def shares(self, probs: Tensor) -> Tensor:
        """Sum what is true of keys ``(..., S)`` by unit, ``(..., U)``."""
        return probs

    def best(self, scores: Tensor, free: Tensor) -> Tensor:
        """Choose as the model does, bool like ``scores``; the first wins a tie, on every device."""
        ranked = scores.masked_fill(~free, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(-1, ranked[..., : self.num_chosen], True) & free

    def chosen(self, choice: Tensor, free: Tensor) -> Tensor:
        """Mark the free units that a model's own ``choice (B, groups, m, n)`` has, bool ``(B, groups, m, U)``."""
        slots = choice.long().where(choice >= 0, free.shape[-1])
        chosen = free.new_zeros(*choice.shape[:3], free.shape[-1] + 1)
        return chosen.scatter_(-1, slots, True)[..., :-1] & free


class QSA(ReleasedIndexer):
    """qwen4_exp: the mean key of ``size`` tokens that are complete; positive products, summed over heads."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.size, self.num_chosen = module.compress_ratio, module.block_topk

    def features(self, given: dict[str, Any], tokens: Tensor) -> Features:
        """Average raw keys from every token on; then norm, and the rotation of the first."""
        module, rope = self.module, given["position_embeddings"]
        heads = module.index_qk_proj(given["hidden_states"]).unflatten(-1, (-1, module.index_head_dim))
        q = module.q_layernorm(at_tokens(heads[:, :, : module.index_n_heads], tokens))
        raw = _wide(heads[:, :, module.index_n_heads])
        pooled = F.pad(raw, (0, 0, 0, self.size - 1)).unfold(1, self.size, 1).mean(-1).to(heads.dtype)
        k = module.k_layernorm(pooled[:, :, None])
        return Features(_rotate(q, _rope_at(rope, tokens)).transpose(1, 2), _rotate(k, rope).transpose(1, 2))

    def scores(self, features: Features, visible: Tensor) -> Tensor:  # noqa: ARG002
        """Sum the positive products of all heads."""
        products = _wide(features.q) @ _wide(features.k).mT
        return products.relu().sum(1, keepdim=True) * self.module.index_head_dim**-0.5

    def free(self, visible: Tensor, tokens: Tensor) -> Tensor:
        """Count runs from the first visible token; none that is not complete competes."""
        first = visible.to(torch.int8).argmax(-1, keepdim=True)
        column = torch.arange(visible.shape[-1], device=visible.device)
        return visible & (column + self.size <= tokens[..., None] + 1) & ((column - first) % self.size == 0)

    def chosen(self, choice: Tensor, free: Tensor) -> Tensor:
        """Look for the first token of a run in a mask."""
        return choice[..., : free.shape[-1]] & free

    def shares(self, probs: Tensor) -> Tensor:
        """Sum from every token on."""
        return F.pad(probs, (0, self.size - 1)).unfold(-1, self.size, 1).sum(-1)


class MSA(ReleasedIndexer):
    """minimax_m3_vl: the best key of a block of slots, for each key head; the last blocks are forced."""

    any_start = False

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.size, self.groups = module.block_size, module.num_heads
        self.num_chosen = module.topk_blocks - module.local_blocks

    def features(self, given: dict[str, Any], tokens: Tensor) -> Features:
        """Map, norm and rotate."""
        module, x = self.module, given["hidden_states"]
        rope = tuple(each[..., : module.head_dim] for each in given["position_embeddings"])
        q = module.q_norm(module.q_proj(at_tokens(x, tokens)).unflatten(-1, (-1, module.head_dim)))
        k = module.k_norm(module.k_proj(x)[:, :, None])
        return Features(_rotate(q, _rope_at(rope, tokens)).transpose(1, 2), _rotate(k, rope).transpose(1, 2))

    def scores(self, features: Features, visible: Tensor) -> Tensor:
        """Take the best visible key of a block; a top-k needs no scale, but a softmax does."""
        products = _wide(features.q) @ _wide(features.k).mT * self.module.head_dim**-0.5
        return self._blocks(products.masked_fill(~visible[:, None], -torch.inf), -torch.inf).amax(-1)

    def free(self, visible: Tensor, tokens: Tensor) -> Tensor:
        """Leave out the last blocks."""
        blocks = self._blocks(visible, False).any(-1)
        last = tokens[..., None] // self.size - self.module.local_blocks
        return blocks & (torch.arange(blocks.shape[-1], device=tokens.device) <= last)

    def shares(self, probs: Tensor) -> Tensor:
        """Sum by block."""
        return self._blocks(probs, 0).sum(-1)

    def _blocks(self, x: Tensor, fill: float) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % self.size), value=fill).unflatten(-1, (-1, self.size))


class DSA(ReleasedIndexer):
    """deepseek_v32: tokens; positive products, summed over heads with factors of the query's input."""

    def __init__(self, module: Any, **rotation: bool) -> None:
        super().__init__(module)
        self.num_chosen, self.rotation = module.index_topk, rotation

    def features(self, given: dict[str, Any], tokens: Tensor) -> Features:
        """Map, norm and rotate."""
        module, x, rope = self.module, given["hidden_states"], given["position_embeddings"]
        at = at_tokens(x, tokens)
        k = module.wk(x).to(module.k_norm.weight.dtype)
        q, k = self.queries(given, tokens), module.k_norm(k).to(x.dtype)[:, :, None]
        if getattr(module, "use_rope", True):
            q, k = (_rotate(*each, **self.rotation) for each in ((q, _rope_at(rope, tokens)), (k, rope)))
        weights = _wide(module.weights_proj(at.to(module.weights_proj.weight.dtype))) * module.n_heads**-0.5
        return Features(q.transpose(1, 2), k.transpose(1, 2), weights.transpose(1, 2))

    def queries(self, given: dict[str, Any], tokens: Tensor) -> Tensor:
        """Map the latent of the queries, ``(B, m, H, D)``."""
        return self.module.wq_b(at_tokens(given["q_resid"], tokens)).unflatten(-1, (-1, self.module.head_dim))

    def scores(self, features: Features, visible: Tensor) -> Tensor:  # noqa: ARG002
        """Weigh the positive products of all heads."""
        assert features.weights is not None
        products = _wide(features.q) @ _wide(features.k).mT * self.module.softmax_scale
        return (products.relu() * features.weights[..., None]).sum(1, keepdim=True)


class MistralDSA(DSA):
    """mistral_large4: queries of the layer's input, times a factor for each head, linear in the log of the position."""

    def queries(self, given: dict[str, Any], tokens: Tensor) -> Tensor:
        """Map the normed input, ``(B, m, H, D)``."""
        module = self.module
        q = module.wq_b(module.q_input_norm(at_tokens(given["hidden_states"], tokens)))
        where = at_tokens(given["position_ids"][..., None], tokens)[..., 0]
        return module.softmax_scaling(q.unflatten(-1, (-1, module.head_dim)), where, head_dim_first=False)


RELEASED: dict[str, Callable[[Any], ReleasedIndexer]] = {
    "qwen4_exp": QSA,
    "minimax_m3_vl": MSA,
    "deepseek_v32": DSA,
    "glm_moe_dsa": partial(DSA, neighbours=True),
    "hy_v4": partial(DSA, last=True),
    "mistral_large4": partial(MistralDSA, neighbours=True),
}
"""By ``model_type``. Not here: deepseek_v4, whose softmax has compressed entries and a window, and glm5_next, which is
wrong in packed rows and cannot share an indexer."""


def at_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Take tokens ``(B, m)`` of ``x (B or 1, S, ...)``; -1 takes any."""
    batch = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    return x.expand(tokens.shape[0], *x.shape[1:])[batch, tokens.clamp_min(0)]


def _rope_at(rope: tuple[Tensor, ...], tokens: Tensor) -> tuple[Tensor, ...]:
    return tuple(at_tokens(each, tokens) for each in rope)


def _rotate(x: Tensor, rope: tuple[Tensor, ...], *, neighbours: bool = False, last: bool = False) -> Tensor:
    """Rotate the first or last R dims of ``x (B, T, H, D)`` by cos and sin ``(B, T, R)``, which have each angle twice.

    Neighbours come back as halves, which leaves products the same.
    """
    width = rope[0].shape[-1]
    cos, sin = (each[..., : width // 2].unsqueeze(2) for each in rope)
    part, rest = (x[..., -width:], x[..., :-width]) if last else (x[..., :width], x[..., width:])
    a, b = (part[..., 0::2], part[..., 1::2]) if neighbours else part.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
