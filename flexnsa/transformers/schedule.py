"""A schedule of up-training: when which parameters of a converted model learn, and how far new branches are open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flexnsa.primitives import check_int, describe
from flexnsa.transformers.attention import ConvertedAttention
from flexnsa.transformers.options import LayerOptions

NEW = ("k_proj_cmp", "v_proj_cmp", "k_proj_win", "v_proj_win", "compress_k", "compress_v", "gate", "indexer")
"""Modules of the compressed branch, the window, the gates and the indexer; all other parameters are pretrained."""


class UpTraining(TrainerCallback):
    """Open the compressed branch and the window gradually, and freeze pretrained parameters at first.

    Both depend only on the optimizer's step, so a resumed run continues the schedule.

    Args:
        opening_steps: steps over which a factor on the gates of both branches rises to 1. The factor is stored in
            ``config.flexnsa``, so a checkpoint in between computes the same when it is loaded.
        frozen_steps: steps in which only the parameters of both branches, of the gates and of an indexer change.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is negative; or, when training starts, the model is not a converted one.
    """

    def __init__(self, *, opening_steps: int = 0, frozen_steps: int = 0) -> None:
        check_int("opening_steps", opening_steps, 0)
        check_int("frozen_steps", frozen_steps, 0)
        self.opening_steps, self.frozen_steps = opening_steps, frozen_steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Multiply the gates of all branches but the selected one by what the schedule says for this step."""
        if not any(isinstance(module, ConvertedAttention) for module in model.modules()):
            raise ValueError(f"model: expected a converted one, got {describe(type(model).__name__)}")
        opening = min(1.0, (state.global_step + 1) / max(1, self.opening_steps))
        if LayerOptions.of(model.config).opening != opening:
            model.config.flexnsa = {**model.config.flexnsa, "opening": opening}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        """Remove the gradients of frozen parameters before the optimizer's step."""
        if state.global_step < self.frozen_steps:
            for parameter in pretrained_parameters(model):
                parameter.grad = None


def pretrained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a converted model took over from the dense one, the new branches' copies aside."""
    for name, parameter in model.named_parameters():
        if not {*NEW} & {*name.split(".")}:
            yield parameter
