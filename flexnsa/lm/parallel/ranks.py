"""Ranks, the processes that train one model. Here: a single process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flexnsa.lm.model.decoder import DecoderLM

T = TypeVar("T")


class Ranks:
    """A single process; ranks that share their work override these methods.

    Every rank draws the whole batch of a step and computes the loss of its share of the sequences, so that a step is
    the same on any number of ranks. Ranks communicate whatever depends on their clocks, files or signals before they
    act on it: ranks that acted differently would wait for each other forever.
    """

    rank: int = 0
    world_size: int = 1
    sharded: bool = False
    """Whether each rank holds only shards of the parameters."""
    context_parallel: int = 1
    """Number of consecutive ranks that share the tokens of the same sequences."""

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Return the model that ``make`` builds, on a device and with the same parameters on all ranks."""
        return make().to(device)

    def wrap(self, model: DecoderLM, *, some_unused: bool = False) -> nn.Module:  # noqa: ARG002
        """Return the module to call in place of the model of :meth:`build`; its backward pass averages over ranks.

        With ``some_unused``, some parameters get no gradient.
        """
        return model

    def compile(self, model: DecoderLM, **options: Any) -> None:
        """Run the layers through ``torch.compile(**options)``; all share the same code."""
        model.compile_layers(**options)

    def share(self, num_rows: int) -> slice:
        """Return this rank's sequences of a batch, of whose tokens it may have a part."""
        size = num_rows * self.context_parallel // self.world_size
        first = self.rank // self.context_parallel * size
        return slice(first, first + size)

    def cut(self, rows: Tensor) -> Tensor:
        """Return this rank's tokens of sequences ``(B, S)``."""
        return rows

    def settle(self, backward: Callable[[], object]) -> None:
        """Run a first backward pass where ranks need one before the first step; its gradients are dropped."""

    def part(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context of one of the forward and backward passes of a step."""
        return nullcontext()

    def total(self, value: float) -> float:
        """Return the sum over the ranks."""
        return self.totals(torch.tensor(value, dtype=torch.float64)).item()

    def totals(self, values: Tensor) -> Tensor:
        """Return the sums over the ranks of numbers in fp64."""
        return values

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks in their order."""
        return [value]

    def require_same(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Check that all ranks have the same values, by name; those of nested mappings have names of their own.

        Raises:
            RanksDifferError: some differ; raised on all ranks.
        """

    def collectives(self) -> int:
        """Count the collectives that this rank has started, without communication."""
        return 0

    def on_first(self, act: Callable[[], object]) -> None:
        """Call ``act`` on rank 0 while the others wait.

        Raises:
            OSError: ``act`` raised it on rank 0; raised on all ranks.
            ValueError: as for OSError.
        """
        self.on_all(lambda: act() if self.rank == 0 else None)

    def on_all(self, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every rank, and return the results of all ranks in order.

        Raises:
            OSError: ``act`` raised it on a rank; raised on all ranks.
            ValueError: as for OSError.
        """
        return [act()]
