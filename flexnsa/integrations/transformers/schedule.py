"""A schedule of up-training: what of a converted model learns when, and how far its new branches are open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flexnsa.integrations.transformers.attention import ConvertedAttention
from flexnsa.integrations.transformers.options import LayerOptions
from flexnsa.validation import check_int, describe

NEW = ("k_proj_cmp", "v_proj_cmp", "k_proj_win", "v_proj_win", "compress_k", "compress_v", "gate")
"""What the compressed branch, the window and the gates are made of; the rest is as the dense model learned it."""


class UpTraining(TrainerCallback):
    """Open the compressed branch and the window step by step, and hold what was pretrained still at first.

    Both are told by the number of the optimizer's step, so that a run goes on as it was when it is resumed.

    Args:
        opening_steps: over these, the gates of both branches grow from almost nothing to what they are by themselves.
            How far they are stands in ``config.flexnsa``, so that a checkpoint in between means what it did.
        frozen_steps: for these, only the parameters of both branches and the gates are changed.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is negative; or, when training begins, the model is no converted one.
    """

    def __init__(self, *, opening_steps: int = 0, frozen_steps: int = 0) -> None:
        check_int("opening_steps", opening_steps, 0)
        check_int("frozen_steps", frozen_steps, 0)
        self.opening_steps, self.frozen_steps = opening_steps, frozen_steps

    def on_step_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        model: Any = None,
        **_: Any,
    ) -> None:
        """Open the branches as far as this step says."""
        opening = min(1.0, (state.global_step + 1) / max(1, self.opening_steps))
        open_branches(model, opening)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        model: Any = None,
        **_: Any,
    ) -> None:
        """Let the optimizer see no gradient of what is to stay as it is."""
        if state.global_step < self.frozen_steps:
            for parameter in pretrained_parameters(model):
                parameter.grad = None


def open_branches(model: Any, opening: float) -> None:
    """Multiply the gates of the compressed branch and of the window by ``opening``, in every layer.

    Raises:
        ValueError: the model has no converted layers.
    """
    if not any(isinstance(module, ConvertedAttention) for module in model.modules()):
        raise ValueError(f"model: expected a converted one, got {describe(type(model).__name__)}")
    if LayerOptions.of(model.config).opening != opening:
        model.config.flexnsa = {**model.config.flexnsa, "opening": opening}


def pretrained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Give the parameters that a converted model has from the dense one, and goes on to use as that did."""
    for name, parameter in model.named_parameters():
        if not {*NEW} & {*name.split(".")}:
            yield parameter
