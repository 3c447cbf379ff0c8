"""The first value of a step that is not finite: its direction, layer, branch, sequence and token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flexnsa.layers.attention import NativeSparseAttention
from flexnsa.layers.projection import weight_of
from flexnsa.lm.model.decoder import DecoderLM
from flexnsa.lm.model.loss import only_multiplies
from flexnsa.lm.training.trainer import Trainer

_PARTS = {
    r"attention\.w_[kv]_(cmp|slc|win)\b.*": r"branch \1",
    r"attention\.phi_[kv]\b.*": "branch cmp",
    r"attention\.gate\b.*": "gate",
    r"attention\.w_q\b.*": "projection of the queries",
    r"attention\.w_o\b.*": "projection of the output",
    r"attention(\..*)?": "attention",
    r"mlp(\..*)?": "MLP",
    r"(attention|mlp)_norm\b.*": "norm",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """A value that is not finite.

    Args:
        looked: number of tensors of the step that were checked before it.
        direction: ``"forward"`` or ``"backward"``.
        place: module, in words.
        forward_pass: forward pass of the step, counted from 0.
        row: sequence of that pass, if the tensor has sequences.
        token: token of that sequence, if the tensor has tokens.
    """

    looked: int
    direction: str
    place: str
    forward_pass: int
    row: int | None = None
    token: int | None = None


@contextmanager
def strict(trainer: Trainer, _folder: Path) -> Iterator[Callable[[], None]]:
    """Check the output of every module and every gradient; a watcher of :func:`flexnsa.lm.training.run`.

    Steps then raise FloatingPointError, the same on all ranks, before parameters change or anything is written. Hooks
    do not see the inside of compiled layers.
    """
    with ExitStack() as hooks:
        check = FirstNonFinite(trainer, hooks).check
        trainer.checks.append(check)
        hooks.callback(trainer.checks.remove, check)
        yield lambda: None


class FirstNonFinite:
    """Hooks on the modules of a model, which record the first value that is not finite, until ``hooks`` is closed.

    They do not raise: the other ranks would wait for a rank that left a step. Each check synchronizes.
    """

    def __init__(self, trainer: Trainer, hooks: ExitStack) -> None:
        self.trainer = trainer
        self._begin()
        for name, module in modules_to_watch(trainer.model):
            hooks.enter_context(module.register_forward_hook(partial(self._look_at_output, place_of(name))))
            if isinstance(module, NativeSparseAttention):
                self._watch_branches(name, module, hooks)
        hooks.enter_context(trainer.model.register_forward_pre_hook(self._count_pass))

    def check(self) -> None:
        """Gather the findings of all ranks, before the step changes the parameters.

        Raises:
            FloatingPointError: a rank has a value that is not finite; names the first.
        """
        self._look_at_parameters()
        finding = self._finding
        if finding is not None and finding.row is not None:
            finding = replace(finding, row=self._row_of_batch(finding, finding.row))
        findings = self.trainer.ranks.gather(finding)
        self._begin()
        first = min((rank for rank, x in enumerate(findings) if x), key=lambda rank: findings[rank].looked, default=-1)
        if first >= 0:
            raise FloatingPointError(self._in_words(findings[first], first))

    def _begin(self) -> None:
        self._finding: Finding | None = None
        self._looked = self._passes = 0

    def _count_pass(self, *_: object) -> None:
        self._passes += 1

    def _look_at_output(self, place: str, _module: nn.Module, _inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        for x in first.values() if isinstance(first, dict) else (first,):  # a gate returns a dict
            if isinstance(x, Tensor):
                self._look_both_ways(x, place)

    def _watch_branches(self, name: str, attention: NativeSparseAttention, hooks: ExitStack) -> None:
        """Check the sum of the branches, which no module returns: it is the input of ``w_o``."""
        called: list[tuple[Tensor, dict[str, Any]]] = []
        place = place_of(name.removesuffix(".attention"))

        def remember(_module: nn.Module, inputs: tuple[Tensor], options: dict[str, Any]) -> None:
            called[:] = [(inputs[0], options)]

        def look(_module: nn.Module, inputs: tuple[Tensor]) -> None:
            finding = self._look_both_ways(inputs[0], f"{place}, sum of the branches")
            tag = None if finding is None else failing_branch(attention, *called[0])
            if finding is not None and tag is not None:
                self._finding = replace(finding, place=f"{place}, branch {tag} (what it gives)")
            called.clear()

        hooks.enter_context(attention.register_forward_pre_hook(remember, with_kwargs=True))
        hooks.enter_context(attention.w_o.register_forward_pre_hook(look))

    def _look_both_ways(self, x: Tensor, place: str) -> Finding | None:
        """Check a tensor now and its gradient later; return the finding if it is the first."""
        if x.requires_grad:
            x.register_hook(partial(self._look, "backward", place, self._passes - 1))
        before = self._finding
        self._look("forward", place, self._passes - 1, x)
        return self._finding if before is None else None

    @torch.no_grad()
    def _look(self, direction: str, place: str, forward_pass: int, x: Tensor) -> None:
        if self._finding is not None:
            return
        self._looked += 1
        finite = torch.isfinite(x.detach())
        if not bool(finite.all()):
            at = (~finite).nonzero()[0].tolist()
            row, token = at[0] if x.dim() > 1 else None, at[1] if x.dim() == 3 else None
            self._finding = Finding(self._looked, direction, place, forward_pass, row, token)

    def _look_at_parameters(self) -> None:
        """Check the gradients of parameters, whose sums may overflow first."""
        for name, parameter in self.trainer.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                # Flat, because the elements of a parameter belong to no sequence of the batch
                self._look("backward", f"{place_of(name)}, gradient of the parameter", 0, local.flatten())

    def _row_of_batch(self, finding: Finding, row: int) -> int:
        """Return the index of a sequence in the step: each rank takes some sequences, and a pass some of these."""
        config, ranks = self.trainer.config, self.trainer.ranks
        evaluated = not self.trainer.model.training
        config = config if evaluated else config.at(self.trainer.step)
        rows = config.eval_sequences if evaluated else config.sequences_per_step
        share = ranks.share(rows)
        passes = -(-(share.stop - share.start) // config.batch_size)
        before = self._passes - passes  # a first step repeats its first pass
        return share.start + max(0, finding.forward_pass - before) * config.batch_size + row

    def _in_words(self, finding: Finding, rank: int) -> str:
        step = self.trainer.step
        when = f"step {step}" if self.trainer.model.training else f"evaluation after {step} steps"
        words = [f"{when}: the first non-finite value is in {finding.direction}, {finding.place}"]
        words += [f"row {finding.row}"] if finding.row is not None else []
        words += [f"token {finding.token}"] if finding.token is not None else []
        words += [f"rank {rank}"] if self.trainer.ranks.world_size > 1 else []
        return ", ".join(words)


def place_of(name: str) -> str:
    """Describe a module or parameter of :class:`flexnsa.lm.DecoderLM` by its name.

    Example:
        >>> place_of("layers.3.attention.w_v_slc")
        'layer 3, branch slc (attention.w_v_slc)'
    """
    if not name:
        return "head and loss"
    match = re.fullmatch(r"layers\.(\d+)(?:\.(.*))?", name)
    if match is None:
        return name
    layer, within = match.groups()
    if within is None:
        return f"layer {layer}"
    for pattern, words in _PARTS.items():
        if part_match := re.fullmatch(pattern, within):
            part = part_match.expand(words)
            return f"layer {layer}, {part}" + ("" if part == within else f" ({within})")
    return f"layer {layer}, {within}"


def modules_to_watch(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name the modules that hooks may hang on without changing what is computed.

    A head that is no more than its weight is left out: the loss never calls it, and would have to if it had a hook.
    """
    uncalled = model.head if isinstance(model, DecoderLM) and only_multiplies(model.head) else None
    return ((name, module) for name, module in model.named_modules() if module is not uncalled)


@torch.no_grad()
def failing_branch(layer: NativeSparseAttention, x: Tensor, options: Mapping[str, Any]) -> str | None:
    """Tell which branch of a layer gives something that is not finite, by running one after the other.

    ``x (B, S, dim)`` and ``options`` are what it was called with; its projections are finite.
    """
    for tag in layer.dense_branches or layer.branches:
        # Blocks are scored by the keys of the compressed branch, which is finite.
        tags = ("cmp", "slc") if tag == "slc" and "cmp" in layer.branches else (tag,)
        part = _part_of(layer, tags).to(weight_of(layer))
        options = {name: value for name, value in options.items() if name != "return_index"}
        if not part.follows:
            options.pop("index", None)
        if not bool(torch.isfinite(part(x, **options)).all()):
            return tag
    return None


def _part_of(layer: NativeSparseAttention, tags: tuple[str, ...]) -> NativeSparseAttention:
    """Return a layer of some branches that has the modules of ``layer``, but a fresh gate and a fresh ``w_o``."""
    part = NativeSparseAttention.of(layer.layer_config.with_branches(tags), follows=layer.follows and "slc" in tags)
    for name, _ in part.named_children():
        if name not in ("gate", "w_o"):
            owner = name if hasattr(layer, name) else "w_k_slc"  # whose keys the compressed branch may share
            part.add_module(name, layer.get_submodule(owner))
    return part
