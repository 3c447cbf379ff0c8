"""Teach the indexers of a released model from outside: its files, its numbers and its trainer stay as they are.

The model calls its own attention by a name of ours, and there each layer hands over its queries and keys. The loss and
its gradient are computed once, in the forward pass, whatever activation checkpointing runs again. Backward meets the
gradient where it enters the model, so that trainers, DDP and FSDP need not know of it.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from flexnsa.attention.sampling import sampled_tokens
from flexnsa.layers.indexer import SAMPLED_QUERIES, SelectionLoss
from flexnsa.operators.attached_losses import Attached, Once
from flexnsa.primitives import check_choice, check_positive_number, check_type, describe
from flexnsa.transformers.cache import take_cache
from flexnsa.transformers.released_indexers import RELEASED
from flexnsa.transformers.taught_layers import Lesson, Pass, TaughtLayer, indexed_layers, mean_of

TAUGHT = {"sdpa": "flexnsa_taught_sdpa", "eager": "flexnsa_taught_eager"}
"""The names by which a taught model calls its own attention."""


def teach_indexers(
    model: nn.Module,
    stage: str = "warmup",
    *,
    weight: float = 1.0,
    num_queries: int = SAMPLED_QUERIES,
    query_weights: str = "mass",
    seed: int = 0,
) -> IndexTeaching:
    """Attach a selection loss to the indexers of a released model, which nothing in transformers teaches.

    The loss is the divergence of an indexer's scores from the model's own attention, over the units that it ranks, at
    a few queries of each sequence. Backward from what the model returns teaches the indexers too, with ``weight``. A
    backward through :meth:`IndexTeaching.loss` does so in its place. Only indexers get a gradient of it. A layer that
    reads the choice of another layer teaches that one's indexer. An indexer whose parameters are all frozen, as by
    adapters, learns until ``remove()``; in others, frozen parameters stay so. Checkpoints of adapters have the indexers
    only with ``modules_to_save=["indexer"]``.

    Example:
        >>> with teach_indexers(model, stage="warmup") as teaching:
        ...     model(input_ids=tokens, labels=tokens).loss.backward()
        ...     print(teaching.loss(), teaching.recall().min())

    Args:
        model: of type ``qwen4_exp``, ``minimax_m3_vl``, ``deepseek_v32``, ``glm_moe_dsa``, ``hy_v4`` or
            ``mistral_large4``, also wrapped, with the attention ``"sdpa"`` or ``"eager"``.
        stage: ``"warmup"``: all layers attend densely, and all parameters but those of indexers are frozen until
            ``remove()``; scores compete over all past units. ``"joint"``: the model is as it was, its numbers too;
            scores compete over the units that it chooses.
        weight: of the loss, in a backward that begins elsewhere. Divide it by the number of accumulated batches.
        num_queries: of each sequence, drawn anew in each pass; a shorter one gives all.
        query_weights: ``"mass"``, the true mass of the units that are compared, or ``"mean"``.
        seed: chooses the queries, with the number of the pass.

    Returns:
        What is attached; also a context manager, which removes it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, the model has no such layers, or is taught already; or, in a pass, the
            model itself is wrong for rows that are padded or packed so.
    """
    check_type("model", model, nn.Module)
    check_choice("stage", stage, ("warmup", "joint"))
    check_positive_number("weight", weight)
    options = SelectionLoss(seed=seed, num_queries=num_queries, query_weights=query_weights)
    return IndexTeaching(model, stage, weight, options)


class Total:
    """A sum over passes, until it is taken."""

    value: Tensor | None = None
    passes = 0

    def add(self, value: Tensor) -> None:
        """Add what a pass has."""
        self.value, self.passes = value if self.value is None else self.value + value, self.passes + 1

    def take(self) -> tuple[Tensor, int]:
        """Return the sum and the number of passes, and begin anew."""
        value, passes = self.value, self.passes
        if value is None:
            raise ValueError("loss, recall: expected a pass of the model since the last call, got none")
        self.value, self.passes = None, 0
        return value, passes


class IndexTeaching(AbstractContextManager["IndexTeaching"]):
    """A selection loss that is attached to a model, by :func:`teach_indexers`.

    Attributes:
        step: number of the next pass, which chooses its queries with the seed; may be set.
        weight: of the loss, in a backward that begins elsewhere; may be set.
    """

    def __init__(self, model: nn.Module, stage: str, weight: float, options: SelectionLoss) -> None:
        self.weight, self.step, self._options = weight, 0, options
        self._text = _text_model(model)
        self._config = cast("Any", self._text.config)
        self._lesson = Lesson(self._config._attn_implementation, by_mass=options.query_weights == "mass")
        if self._lesson.implementation not in TAUGHT:
            used = describe(self._lesson.implementation)
            raise ValueError(f"model: expected attn_implementation 'sdpa' or 'eager' to teach indexers, got {used}")
        self._passes: list[Pass] = []
        self._loss, self._uniform, self._found = Total(), Total(), Total()
        self._required = {parameter: parameter.requires_grad for parameter in model.parameters()}
        self._layers: list[TaughtLayer] = []
        kind, leader = self._config.model_type.removesuffix("_text"), None
        for layer in indexed_layers(self._text):
            self._layers.append(TaughtLayer(self._lesson, layer, kind, leader))
            leader = self._layers[-1].leader or leader
            parameters = self._layers[-1].parameters
            for parameter in () if any(each.requires_grad for each in parameters) else parameters:
                parameter.requires_grad_()
        self.stage = stage
        self._config._attn_implementation = TAUGHT[self._lesson.implementation]
        began = self._text.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._hooks = [began, self._text.register_forward_hook(self._end)]

    @property
    def stage(self) -> str:
        """``"warmup"`` or ``"joint"``; setting it freezes the other parameters, or leaves them as they were."""
        return self._lesson.stage

    @stage.setter
    def stage(self, stage: str) -> None:
        check_choice("stage", stage, ("warmup", "joint"))
        self._lesson.stage = stage
        learning = {parameter for layer in self._layers for parameter in layer.parameters}
        for parameter in self._required.keys() - learning:
            parameter.requires_grad_(self._required[parameter] and stage == "joint")

    @property
    def were_frozen(self) -> bool:
        """Whether parameters of indexers learn until :meth:`remove` only."""
        return any(p.requires_grad > self._required[p] for layer in self._layers for p in layer.parameters)

    @property
    def was_compared(self) -> bool:
        """Whether there was a pass since the last call of :meth:`loss`."""
        return bool(self._passes) or self._loss.passes > 0

    def loss(self) -> Tensor:
        """Return the sum over layers of mean divergences in nats, a mean over the passes since the last call.

        Its gradient reaches the parameters of indexers, once: what a backward has taught by it, the model's outputs do
        not teach again, and the reverse.

        Raises:
            ValueError: no pass was compared since; so do the other two.
        """
        passes, self._passes = self._passes, []
        for each in passes:
            self._loss.add(cast("Tensor", Once.apply(each.total, each)))
        total, count = self._loss.take()
        return total / count

    def uniform_loss(self) -> Tensor:
        """Return what :meth:`loss` would be if all units had one score, a mean over the passes since the last call."""
        total, count = self._uniform.take()
        return total / count

    def recall(self) -> Tensor:
        """Return the true mass of the chosen units over that of the best as many, fp32 ``(L,)``, since the last call.

        Units that every choice has do not count, nor do queries that may choose all. NaN where none is left.
        """
        chosen, best = self._found.take()[0].T
        return (chosen / best).float()

    def remove(self) -> None:
        """Leave the model as it was, with what its indexers have learned."""
        for each in (*self._hooks, *self._layers):
            each.remove()
        for parameter, required in self._required.items():
            parameter.requires_grad_(required)
        self._config._attn_implementation = self._lesson.implementation

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the queries of a pass, if it has whole sequences."""
        given = inspect.signature(text.forward).bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self._lesson.one_pass = None
        cache, teaches = take_cache(given, given.get("cache")), torch.is_grad_enabled()
        if cache is not None and cache.get_seq_length():
            return
        x = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        mask = given.get("attention_mask")
        any_start = all(layer.released is None or layer.released.any_start for layer in self._layers)
        problem = _problem(mask, given.get("position_ids"), any_start=any_start)
        if problem and teaches:
            raise ValueError(problem)
        if problem:
            return
        ids, lengths = torch.arange(x.shape[0], device=x.device), None if mask is None else mask.sum(1)
        options = self._options
        tokens = sampled_tokens(x.shape[1], options.num_queries, options.seed, self.step, ids, lengths)
        if mask is not None:
            tokens = (tokens + mask.to(torch.int8).argmax(1, keepdim=True)).where(tokens >= 0, -1)
        self._lesson.one_pass = Pass(tokens, teaches)
        self.step += teaches

    def _end(self, text: nn.Module, args: tuple[Any, ...], out: Any) -> Any:  # noqa: ARG002
        """Attach the loss of a pass to the hidden states that the model returns."""
        done, self._lesson.one_pass = self._lesson.one_pass, None
        if done is None or not done.sums:
            return out
        x = out[0]
        sums = torch.stack([torch.stack(each).to(x.device) for each in done.sums])  # (L, 5)
        losses = done.losses or list(mean_of(sums[:, 0], sums[:, 2]))
        done.total = torch.stack([loss.to(x.device) for loss in losses]).sum()
        done.features.clear()
        for each in self._passes:  # a graph that nothing needs any more would keep its memory until loss() is called
            if each.taught or not each.teaches:
                self._loss.add(each.total.detach())
        self._passes = [*(each for each in self._passes if each.teaches and not each.taught), done]
        self._uniform.add(mean_of(sums[:, 1], sums[:, 2]).sum())
        self._found.add(sums[:, 3:])
        if not done.teaches:
            return out
        once: Any = Once.apply(done.total, done)
        attached = Attached.apply(x, self.weight * once)
        if isinstance(out, tuple):
            return attached, *out[1:]
        out[next(iter(out))] = attached
        return out


def _text_model(model: nn.Module) -> PreTrainedModel:
    """Return the part of a model that has its layers."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    texts = [part for part in parts if hasattr(part, "layers") and indexed_layers(part)]
    kind = str((texts or parts)[-1].config.model_type if parts else type(model).__name__)
    if not texts or kind.removesuffix("_text") not in RELEASED:
        raise ValueError(f"model: expected indexers of {', '.join(RELEASED)}, got {describe(kind)}")
    if getattr(texts[-1], "tp_size", None) not in (None, 1):
        raise ValueError("model: expected no tensor parallelism to teach indexers, because a rank has some heads only")
    if any(hasattr(module, "taught") for module in texts[-1].modules()):
        raise ValueError("model: expected one that is not taught already, got one without remove()")
    return texts[-1]


def _problem(mask: Any, position_ids: Tensor | None, *, any_start: bool) -> str | None:
    """Say why a model does not learn from rows that are padded or packed so.

    This looks at values on any device, as transformers does to choose a kernel.
    """
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return f"attention_mask: expected (B, S) or None to teach indexers, got {describe(mask)}"
    if mask is not None and bool(((mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0] > 1).any()):
        return "attention_mask: expected no gap between tokens to teach indexers, got one"
    if any_start:
        return None
    if mask is not None and not bool(mask[:, 0].all()):
        return "attention_mask: expected padding on the right, because this model's blocks begin at slots, got it left"
    if position_ids is not None:
        same = position_ids == torch.arange(position_ids.shape[-1], device=position_ids.device)
        if not bool((same if mask is None else same | (mask == 0)).all()):
            return "position_ids: expected one document a row, because this model's blocks begin at slots, got others"
    return None
