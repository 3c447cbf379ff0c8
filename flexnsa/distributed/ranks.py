"""The processes that train one model, called ranks. Here: a process on its own, which has nobody to tell anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.models import DecoderLM


class Ranks:
    """One process on its own; ranks that share their work take another place for each of these methods.

    Every rank draws the whole batch of a step and computes the loss of its share of the rows, so that a step of any
    number of ranks is the same step. Whatever depends on a rank's own clock, files or signals is told to all of them
    before anything follows from it: ranks that took different ways would wait for each other for ever.
    """

    rank: int = 0
    world_size: int = 1
    sharded: bool = False
    """Whether no rank holds all parameters."""
    context_parallel: int = 1
    """Ranks, one after the other, that share the tokens of the same rows."""

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Give the model that ``make`` gives, its parameters on a device and of the same values on all ranks."""
        return make().to(device)

    def wrap(self, model: DecoderLM) -> nn.Module:
        """Give what is called in place of the model of :meth:`build`; its backward pass averages over ranks."""
        return model

    def compile(self, model: DecoderLM, **options: Any) -> None:
        """Run the layers through ``torch.compile(**options)``, all through the same code."""
        model.compile_layers(**options)

    def share(self, num_rows: int) -> slice:
        """Give this rank's rows of a batch, of whose tokens it may have a part."""
        size = num_rows * self.context_parallel // self.world_size
        first = self.rank // self.context_parallel * size
        return slice(first, first + size)

    def cut(self, rows: Tensor) -> Tensor:
        """Give this rank's tokens of rows ``(B, S)``."""
        return rows

    def settle(self, backward: Callable[[], object]) -> None:
        """Settle, before the first step, what a backward pass settles; its gradients are dropped."""

    def part(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Give the context of one forward and backward pass, of which a step takes some."""
        return nullcontext()

    def total(self, value: float) -> float:
        """Sum over the ranks."""
        return value

    def largest(self, number: int) -> int:
        """Give the largest of the ranks' numbers."""
        return number

    def gather(self, value: object) -> list[Any]:
        """Give the values of all ranks in their order."""
        return [value]

    def collectives(self) -> int:
        """Count the collectives that this rank has begun; without a word to the others."""
        return 0

    def on_first(self, act: Callable[[], object]) -> None:
        """Have rank 0 act while the others wait.

        Raises:
            OSError: rank 0 met one, which is then raised on all.
            ValueError: as for OSError.
        """
        act()
