"""Teach indexers in any trainer: a callback attaches the gradient of the selection loss to what a model returns.

Trainers compute losses of their own from logits or hidden states, and would have to know of another one. Instead its
gradient begins where backward meets the hidden states, whatever loss was computed of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from flexnsa.attention.interface import given
from flexnsa.functional.selection_loss import selection_recall
from flexnsa.layers.indexer import SelectionLoss
from flexnsa.layers.layouts import RowKeys
from flexnsa.layers.projection import weight_of
from flexnsa.operators.attached_losses import Attached
from flexnsa.optim import audit, index_parameters
from flexnsa.primitives import check_int, check_integers, check_positive_number, describe
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.index_teaching import IndexTeaching, teach_indexers
from flexnsa.transformers.taught_layers import indexed_layers


@dataclass(slots=True)
class SelectionLossHook:
    """The selection loss of a model's training passes: a factor on it, and the options of :class:`SelectionLoss`."""

    weight: float
    options: dict[str, Any]
    losses: list[Tensor] = field(default_factory=list)
    """The selection loss of each pass so far."""

    def selection(self) -> SelectionLoss:
        """Return the selection loss of one pass."""
        return SelectionLoss(**self.options)

    def attach(self, x: Tensor, selection: SelectionLoss) -> Tensor:
        """Return ``x``, from which backward reaches the selection loss too."""
        total = selection.total
        if not isinstance(total, Tensor):
            return x
        self.losses.append(total.detach())
        return Attached.apply(x, self.weight * total)  # pyright: ignore[reportReturnType]


class TeachSelection(TrainerCallback):
    """Teach the indexers of a model in transformers' Trainer, TRL's, and others with the same callbacks.

    The reported loss stays that of language; the selection loss is logged as ``selection_loss``. Which queries are
    compared depends only on ``seed`` and the optimizer's step, so a resumed run goes on as it would have. To teach
    indexers alone, freeze all other parameters (:func:`flexnsa.optim.index_parameters` are theirs).

    Models that :func:`teach_indexers` takes are taught by it, and may begin with a warm-up. Their stage depends on the
    step alone. What a uniform guess would lose is logged as ``selection_loss_uniform``, and the recall of the worst
    layer as ``selection_recall``. What learns in a stage is logged too, by transformers' logger, as information
    (:func:`flexnsa.optim.audit`). After training the model is as it was, with what its indexers have learned.

    Args:
        weight: of the selection loss.
        warmup_steps: in which such a model attends densely and its indexers alone learn. With DDP, these need
            ``ddp_find_unused_parameters=True``, Trainer's default without activation checkpointing.
        options: ``seed``, ``num_queries`` and ``query_weights`` of :class:`flexnsa.SelectionLoss`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; or, when training starts, the model has no indexer, or is one of ours
            with ``warmup_steps``, or its adapters would not save indexers, or gradients are scaled (``fp16=True``).
    """

    def __init__(self, *, weight: float = 1.0, warmup_steps: int = 0, **options: Any) -> None:
        check_positive_number("weight", weight)
        check_int("warmup_steps", warmup_steps, 0)
        SelectionLoss(**options)
        self.weight, self.warmup_steps, self.options = weight, warmup_steps, options
        self.teaching: IndexTeaching | None = None
        self._audited = ""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Let the indexers of a released model learn before there is an optimizer."""
        self._teach(kw["model"])

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Check that there is something to teach."""
        model = kw["model"]
        self._teach(model)
        if self.teaching is None and (self.warmup_steps or not index_parameters(model) or not _hooked(model)):
            if self.warmup_steps and _hooked(model):
                raise ValueError("warmup_steps: expected 0 for a model without layers to teach densely, got others")
            raise ValueError(f"model: expected one with indexers, got {describe(type(model).__name__)}")
        if self.teaching is not None and self.teaching.were_frozen and hasattr(model, "peft_config"):
            expected = "adapters with modules_to_save=['indexer'], as checkpoints have nothing else of the indexers"
            raise ValueError(f"model: expected {expected}, got others")
        if args.fp16:
            raise ValueError("fp16: expected False with TeachSelection, because gradients are scaled, got True")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Tell the model the step, and the weight of each of its batches."""
        weight = self.weight / args.gradient_accumulation_steps
        for each in _hooked(kw["model"]):
            each.selection_hook = SelectionLossHook(weight, {**self.options, "step": state.global_step})
        if self.teaching is not None:
            stage = "warmup" if state.global_step < self.warmup_steps else "joint"
            self.teaching.stage, self.teaching.step, self.teaching.weight = stage, state.global_step, weight
            if stage != self._audited:
                self._audited = stage
                logging.get_logger().info(f"stage {stage!r} from step {state.global_step}: {audit(kw['model'])}")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Log the selection loss of the last step, or that of a released model since the last log."""
        figures: dict[str, float] = {}
        hooks = [each.selection_hook for each in _hooked(kw["model"]) if each.selection_hook is not None]
        losses = [loss for hook in hooks for loss in hook.losses]
        if losses:
            figures["selection_loss"] = torch.stack(losses).mean().item()
        if self.teaching is not None and self.teaching.was_compared:
            figures["selection_loss"] = self.teaching.loss().item()
            figures["selection_loss_uniform"] = self.teaching.uniform_loss().item()
            figures["selection_recall"] = self.teaching.recall().nan_to_num(1.0).min().item()
        logs = kw.get("logs")
        for entry in (logs, state.log_history[-1]) if logs is not None else ():
            entry |= figures

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Teach no longer."""
        for each in _hooked(kw["model"]):
            each.selection_hook = None
        if self.teaching is not None:
            self.teaching.remove()
            self.teaching, self._audited = None, ""

    def _teach(self, model: Any) -> None:
        """Attach to a model that is not ours, but has indexers."""
        if self.teaching is None and not _hooked(model) and indexed_layers(model):
            self.teaching = teach_indexers(model, "joint", weight=self.weight, **self.options)


def _hooked(model: Any) -> list[Any]:
    """Return the parts of a model that attach the loss to what they return."""
    return [module for module in model.modules() if hasattr(module, "selection_hook")]


@torch.no_grad()
def recall(model: Any, input_ids: Tensor) -> Tensor:
    """Compare the blocks that a converted model selects with the best ones; see :func:`flexnsa.selection_recall`.

    Args:
        model: with the selected branch.
        input_ids: int ``(B, S)``, not padded.

    Returns:
        fp32 ``(L, Hkv)``, without the blocks that every choice has; NaN where there is none to choose.

    Raises:
        TypeError: ``input_ids`` is no tensor.
        ValueError: the model is not a converted one, or selects no blocks; or ``input_ids`` is no batch of sequences.
    """
    layers = [module for module in model.modules() if isinstance(module, ConvertedAttention)]
    if not layers or "slc" not in layers[0].options.branches:
        raise ValueError(f"model: expected a converted one with the branch slc, got {describe(type(model).__name__)}")
    check_integers("input_ids", input_ids, ("B", "S"), like=weight_of(layers[0].q_proj), as_of="the model")
    recalls: list[Tensor] = []

    def compare(layer: ConvertedAttention, _: Any, options: dict[str, Any]) -> None:
        x = options["hidden_states"]
        index = options["shared_index"][layer.leader].get(x) if layer.follows else None
        heads, layout = layer.project(x, rows=True), layer.row_layout(x, None)
        _, read = layer.attend(x, heads, layout, RowKeys(), (None, None), cached=False, index=index)
        keys, blocks = given(read.keys.k_slc), given(read.block_indices)
        recalls.append(selection_recall(read.q, keys, blocks, config=layer.options.sizes, scale=layer.scaling))

    hooks = [layer.register_forward_pre_hook(compare, with_kwargs=True) for layer in layers]
    try:
        model(input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(recalls)
