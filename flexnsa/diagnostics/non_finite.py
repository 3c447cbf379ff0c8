"""The first value of a step that is not finite: in which direction, layer, branch and row it appeared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from flexnsa.diagnostics.places import failing_branch, place_of
from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.training import Trainer


@dataclass(frozen=True, slots=True)
class Finding:
    """A value that is not finite.

    Args:
        looked: at so many tensors of the step before.
        direction: ``"forward"`` or ``"backward"``.
        place: of the model, in words.
        forward_pass: of the step, counted from 0.
        row: of that pass, and
        token: of that row, if the tensor has them.
    """

    looked: int
    direction: str
    place: str
    forward_pass: int
    row: int | None = None
    token: int | None = None


@contextmanager
def strict(trainer: Trainer, _folder: Path) -> Iterator[Callable[[], None]]:
    """Look at what every module gives and at every gradient; a watcher of :func:`flexnsa.training.run`.

    The ranks' steps then raise FloatingPointError, on all ranks the same, before parameters change or anything is
    written. Hooks see nothing of compiled layers.
    """
    first = FirstNonFinite(trainer)
    trainer.checks.append(first.check)
    try:
        yield lambda: None
    finally:
        trainer.checks.remove(first.check)
        first.remove()


class FirstNonFinite:
    """Hooks on the modules of a model, which remember the first value that is not finite.

    They do not raise: a rank that left a step alone would have the others wait for it. Looking waits for the device.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._handles: list[RemovableHandle] = []
        self._begin()
        for name, module in trainer.model.named_modules():
            self._handles.append(module.register_forward_hook(self._looker(place_of(name))))
            if isinstance(module, NativeSparseAttention):
                self._watch_branches(name, module)
        self._handles.append(trainer.model.register_forward_pre_hook(self._count_pass))

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Agree with the other ranks on the step that is about to change the parameters.

        Raises:
            FloatingPointError: a rank has found a value that is not finite; names the first.
        """
        self._look_at_parameters()
        found = self._finding
        if found is not None and found.row is not None:
            found = replace(found, row=self._row_of_batch(found, found.row))
        findings = self.trainer.ranks.gather(found)
        self._begin()
        first = min((rank for rank, x in enumerate(findings) if x), key=lambda rank: findings[rank].looked, default=-1)
        if first >= 0:
            raise FloatingPointError(self._in_words(findings[first], first))

    def _begin(self) -> None:
        self._finding: Finding | None = None
        self._looked = self._passes = 0

    def _count_pass(self, *_: object) -> None:
        self._passes += 1

    def _looker(self, place: str) -> Callable[..., None]:
        def look_forward(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                self._look_both_ways(output, place)

        return look_forward

    def _watch_branches(self, name: str, attention: NativeSparseAttention) -> None:
        """Look at the sum of the branches, which no module gives: it is what ``w_o`` is called with."""
        called: list[tuple[Tensor, dict[str, Any]]] = []
        place = place_of(name.removesuffix(".attention"))

        def remember(_module: nn.Module, inputs: tuple[Tensor], options: dict[str, Any]) -> None:
            called[:] = [(inputs[0], options)]

        def look(_module: nn.Module, inputs: tuple[Tensor]) -> None:
            where = self._look_both_ways(inputs[0], f"{place}, sum of the branches")
            if where is not None:
                tag = failing_branch(attention, *called[0])
                if tag is not None:
                    self._finding = replace(where, place=f"{place}, branch {tag} (what it gives)")
            called.clear()

        self._handles.append(attention.register_forward_pre_hook(remember, with_kwargs=True))
        self._handles.append(attention.w_o.register_forward_pre_hook(look))

    def _look_both_ways(self, x: Tensor, place: str) -> Finding | None:
        """Look at a tensor now and at its gradient when it comes; give the finding if it is the first."""
        if x.requires_grad:
            x.register_hook(partial(self._look_at_gradient, place, self._passes - 1))
        return self._look(x, "forward", place, self._passes - 1)

    def _look_at_gradient(self, place: str, forward_pass: int, gradient: Tensor) -> None:
        self._look(gradient, "backward", place, forward_pass)

    @torch.no_grad()
    def _look(self, x: Tensor, direction: str, place: str, forward_pass: int) -> Finding | None:
        if self._finding is not None:
            return None
        self._looked += 1
        finite = torch.isfinite(x.detach())
        if bool(finite.all()):
            return None
        row, token = None, None
        if x.dim() > 1:
            at = (~finite).nonzero()[0].tolist()
            row, token = at[0], at[1] if x.dim() == 3 else None
        self._finding = Finding(self._looked, direction, place, forward_pass, row, token)
        return self._finding

    def _look_at_parameters(self) -> None:
        """Look at the gradients of parameters, which may be the first that are not finite: sums overflow."""
        for name, parameter in self.trainer.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                # As one row of numbers: those of a parameter belong to no row of the batch.
                self._look(own.flatten(), "backward", f"{place_of(name)}, gradient of the parameter", 0)

    def _row_of_batch(self, found: Finding, row: int) -> int:
        """Count a row from the first of the step: each rank takes some rows, and a pass some of these."""
        config, ranks = self.trainer.config, self.trainer.ranks
        evaluated = not self.trainer.model.training
        rows = config.eval_sequences if evaluated else config.batch_size * config.grad_accumulation
        share = ranks.share(rows)
        passes = -(-(share.stop - share.start) // config.batch_size)
        before = self._passes - passes  # of a first step, which repeats its first pass
        return share.start + max(0, found.forward_pass - before) * config.batch_size + row

    def _in_words(self, found: Finding, rank: int) -> str:
        when = (
            f"step {self.trainer.step}"
            if self.trainer.model.training
            else f"evaluation after {self.trainer.step} steps"
        )
        words = [f"{when}: the first non-finite value is in {found.direction}, {found.place}"]
        words += [f"row {found.row}"] if found.row is not None else []
        words += [f"token {found.token}"] if found.token is not None else []
        words += [f"rank {rank}"] if self.trainer.ranks.world_size > 1 else []
        return ", ".join(words)
