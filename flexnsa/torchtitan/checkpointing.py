"""Selective activation checkpointing that keeps the selected blocks too."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC

from flexnsa.operators.checkpointing import SELECTION_OPERATORS


class KeepingSelection(SelectiveAC):
    """As :class:`SelectiveAC`; blocks are not selected again, which could choose others. See ``keep_selection``."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """As of :class:`SelectiveAC`."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose results are saved."""
        return super().get_save_ops() | {attrgetter(name)(torch.ops) for name in SELECTION_OPERATORS}
