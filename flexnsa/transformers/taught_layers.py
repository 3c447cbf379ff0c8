"""Attention layers of a released model that teach its indexers: they attend as the model does, or densely."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from flexnsa.attention.sampling import Sample
from flexnsa.layers.indexer import backward_pass
from flexnsa.operators.attached_losses import WithGradient, graph_of_its_own
from flexnsa.transformers.index_loss import Attention, Sums, differentiate_index
from flexnsa.transformers.local_layers import attend_as
from flexnsa.transformers.released_indexers import MSA, QSA, RELEASED, Features, ReleasedIndexer, at_tokens


@dataclass(slots=True)
class Pass:
    """One forward pass: the queries to compare, ``tokens (B, m)``, and what layers have compared."""

    tokens: Tensor
    teaches: bool
    features: dict[TaughtLayer, tuple[Features, list[nn.Parameter], Tensor | None]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    taught: bool = False
    """Whether a backward has met the gradient of ``total``."""


@dataclass(slots=True)
class Lesson:
    """What all layers of a taught model share."""

    implementation: str
    """The model's own: ``"sdpa"`` or ``"eager"``."""
    by_mass: bool
    stage: str = ""
    one_pass: Pass | None = None


class TaughtLayer:
    """An attention layer, and the one whose indexer it teaches: itself, or its ``leader``, whose choice it reads."""

    def __init__(self, lesson: Lesson, layer: Any, kind: str, leader: TaughtLayer | None) -> None:
        self.lesson, self.layer, self.given = lesson, layer, dict[str, Any]()
        kept = getattr(layer.indexer, "modules_to_save", None)  # an adapter's copy of the indexer, for its checkpoints
        self.indexer: Any = layer.indexer if kept is None else kept[layer.indexer.active_adapters[0]]
        self.released = None if self.indexer is None else RELEASED[kind](self.indexer)
        self.leader = leader if getattr(layer, "skip_topk", False) else None
        layer.taught = self
        if self.indexer is not None:
            self.leader = self
            self._forward, self._signature = self.indexer.forward, inspect.signature(self.indexer.forward)
            self._replaced = {name: x for name, x in self.indexer.__dict__.items() if name == "forward"}
            self.indexer.forward = self._index

    def remove(self) -> None:
        """Leave the layer as it was."""
        del self.layer.taught
        if self.indexer is not None:
            del self.indexer.forward
            self.indexer.__dict__.update(self._replaced)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the layer's own indexer."""
        return [] if self.indexer is None else list(self.indexer.parameters())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        """Compare, and call the model's own attention with its own choice, or densely."""
        given, self.given = self.given, {}
        dense = given.get("attention_mask") if isinstance(self.released, QSA) else mask
        blocks, indices = options.pop("block_indices", None), options.pop("indices", None)
        if self.lesson.one_pass is not None and self.leader is not None and backward_pass() == -1:
            self._compare(self.lesson.one_pass, given, q, k, dense, options)
        if self.lesson.stage == "warmup":
            mask = dense
        elif blocks is not None:
            where = options.get("position_ids")
            where = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device) if where is None else where
            where = (where if where.dim() > 1 else where[None]).expand(q.shape[0], -1)
            mask = self.indexer.build_block_mask(blocks, mask, k.shape[2], q.dtype, q.device, where)
        elif indices is not None:
            mask = _mask_tokens(cast("Tensor", mask), indices)
        return attend_as(self.lesson.implementation, self.layer, q, k, v, mask, **options)

    def _index(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what the indexer is given, and choose as it does; nothing where all is attended to."""
        self.given = self._signature.bind(*args, **kwargs).arguments
        if self.lesson.stage == "joint":
            self.given["choice"] = self._forward(*args, **kwargs)
            return self.given["choice"]
        x = self.given["hidden_states"]
        if isinstance(self.released, QSA):
            return x.new_ones(1, 1, 1, 1, dtype=torch.bool)
        return None if isinstance(self.released, MSA) else x.new_zeros(*x.shape[:2], 0, dtype=torch.int32)

    def _compare(self, one_pass: Pass, given: dict[str, Any], q: Tensor, k: Tensor, mask: Any, options: Any) -> None:
        """Add what this layer teaches to a pass, or only measure it."""
        leader, sample = cast("TaughtLayer", self.leader), Sample(one_pass.tokens)
        released = cast("ReleasedIndexer", leader.released)
        with graph_of_its_own(), torch.set_grad_enabled(one_pass.teaches):
            if self is leader:
                given = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()}
                learning = [parameter for parameter in self.parameters if parameter.requires_grad]
                choice = given.get("choice")
                if choice is not None:
                    rows = choice[:, :, None] if choice.dim() == 3 else choice.transpose(1, 2)
                    choice = at_tokens(rows, sample.tokens).transpose(1, 2)
                one_pass.features[self] = released.features(given, sample.tokens), learning, choice
            features, learning, choice = one_pass.features[leader]
            with torch.autocast(q.device.type, enabled=False):
                softmax = mask, options["scaling"], options.get("s_aux")
                attention = Attention(sample.take(q.detach()), k.detach(), sample.tokens, *softmax)
                how = {"among_chosen": self.lesson.stage == "joint", "by_mass": self.lesson.by_mass}
                how |= {"gradient": one_pass.teaches}
                sums, grads = differentiate_index(released, features, attention, choice, **how)
            one_pass.sums.append(sums)
            if one_pass.teaches:
                loss: Any = mean_of(sums.kl, sums.weight)
                if learning:  # not where the indexer was frozen meanwhile
                    pairs = zip(grads, features.tensors, strict=True)
                    seeds = [mean_of(grad, sums.weight).to(x.dtype) for grad, x in pairs]
                    made = torch.autograd.grad(features.tensors, learning, seeds, retain_graph=True, allow_unused=True)
                    made = [torch.zeros_like(p) if x is None else x for x, p in zip(made, learning, strict=True)]
                    loss = WithGradient.apply(loss, made, *learning)
                one_pass.losses.append(loss)


def attend_taught(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """Attend in a layer of a taught model: an attention function of transformers."""
    return layer.taught.attend(q, k, v, mask, **options)


def indexed_layers(model: nn.Module) -> list[Any]:
    """List the attention layers of a model that has indexers."""
    return [module for module in model.modules() if hasattr(module, "indexer") and hasattr(module, "scaling")]


def mean_of(sums: Tensor, weights: Tensor) -> Tensor:
    """Divide sums by their weights, where there is any."""
    return sums / weights.where(weights > 0, 1)


def _mask_tokens(mask: Tensor, indices: Tensor) -> Tensor:
    """Hide all but the chosen tokens, as the models do."""
    hidden = indices.new_ones(*indices.shape[:2], mask.shape[-1], dtype=torch.bool)
    hidden = hidden.scatter_(-1, indices.long(), False)[:, None]
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
