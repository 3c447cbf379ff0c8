"""Selective activation checkpointing that keeps the selected blocks too."""

from __future__ import annotations

from dataclasses import dataclass
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
        return super().get_save_ops() | {_operator(name) for name in SELECTION_OPERATORS}


def _operator(name: str) -> Any:
    """Return a registered operator, given its name with its overload: ``library.operator.overload``."""
    library, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, library), operator), overload)
