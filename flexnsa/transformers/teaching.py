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

from flexnsa.layers.indexer import SelectionLoss
from flexnsa.optim import index_parameters
from flexnsa.primitives import check_positive_number, describe


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
        return _Attached.apply(x, self.weight * total)  # pyright: ignore[reportReturnType]


class _Attached(torch.autograd.Function):
    """The first argument, with the gradient of the second."""

    @staticmethod
    def forward(_: Any, x: Tensor, loss: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return grad, grad.new_ones(())


class TeachSelection(TrainerCallback):
    """Teach the indexers of a model in transformers' Trainer, TRL's, and others with the same callbacks.

    The reported loss stays that of language; the selection loss is logged as ``selection_loss``. Which queries are
    compared depends only on ``seed`` and the optimizer's step, so a resumed run goes on as it would have. To teach
    indexers alone, freeze all other parameters (:func:`flexnsa.optim.index_parameters` are theirs).

    Args:
        weight: of the selection loss.
        options: ``seed``, ``num_queries`` and ``query_weights`` of :class:`flexnsa.SelectionLoss`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; or, when training starts, the model has no indexer, or gradients are
            scaled (``fp16=True``).
    """

    def __init__(self, *, weight: float = 1.0, **options: Any) -> None:
        check_positive_number("weight", weight)
        SelectionLoss(**options)
        self.weight, self.options = weight, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Check that there is something to teach."""
        if not index_parameters(model) or not _hooked(model):
            raise ValueError(f"model: expected one with indexers, got {describe(type(model).__name__)}")
        if args.fp16:
            raise ValueError("fp16: expected False with TeachSelection, because gradients are scaled, got True")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Tell the model the step, and the weight of each of its batches."""
        weight = self.weight / args.gradient_accumulation_steps
        for each in _hooked(model):
            each.selection_hook = SelectionLossHook(weight, {**self.options, "step": state.global_step})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Log the selection loss of the last step."""
        hooks = [each.selection_hook for each in _hooked(model) if each.selection_hook is not None]
        losses = [loss for hook in hooks for loss in hook.losses]
        for entry in (logs, state.log_history[-1]) if losses and logs is not None else ():
            entry["selection_loss"] = torch.stack(losses).mean().item()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Teach no longer."""
        for each in _hooked(model):
            each.selection_hook = None


def _hooked(model: Any) -> list[Any]:
    """Return the parts of a model that attach the loss to what they return."""
    return [module for module in model.modules() if hasattr(module, "selection_hook")]
