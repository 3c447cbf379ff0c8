"""Cross-entropy of a linear head in linear memory: no more logits at once than fit a workspace.

Forward takes the rows in chunks, and the gradients of a chunk while its logits are there (arXiv 2410.10989, section
3.2): they are computed once, and what waits for backward has the sizes of the inputs, not of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flexnsa.custom_ops import opaque_operator
from flexnsa.packing import IGNORED
from flexnsa.validation import LARGEST_SIZE, check_choice, check_int, check_tensor, describe, may_look

WORKSPACE_BYTES = 2**30
"""Most bytes that the logits of a chunk and their copies take."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORED, reduction: str = "mean"
) -> Tensor:
    """Give ``cross_entropy(linear(hidden, weight), targets)`` without holding all logits.

    Logits are products in the dtype of ``hidden``, or in that of autocast where it is on; their softmax, the loss and
    the sum of the weight's gradient are fp32 or wider. Beside :data:`WORKSPACE_BYTES`, forward allocates the two
    gradients, the weight's in fp32 or wider, and a copy of the weight where autocast narrows it; backward scales both
    gradients into new memory.

    Args:
        hidden: ``(..., D)``, any floating dtype.
        weight: ``(V, D)``, of the dtype of ``hidden`` unless autocast is on.
        targets: int64 or int32 ``(...)``, each in ``[0, V)`` or ``ignore_index``.
        ignore_index: the target of rows that have no loss.
        reduction: ``"mean"`` over the rows that have a loss, NaN with gradients 0 if none has; or ``"sum"``.

    Returns:
        A scalar in nats, fp32 or wider; it can be differentiated once.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: an argument does not fit the others, or (on a CPU) a target is out of range.
    """
    check_int("ignore_index", ignore_index, -LARGEST_SIZE)
    _check(hidden, weight, targets, reduction)
    dtype = product_dtype(hidden)
    if weight.dtype != hidden.dtype and dtype == hidden.dtype:
        raise ValueError(f"weight: expected dtype {hidden.dtype}, as hidden has, got {weight.dtype}")
    rows, row_targets = hidden.flatten(0, -2), targets.flatten()
    wanted = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    total, *_ = _loss_and_gradients(rows, weight, row_targets, ignore_index, dtype, *wanted)
    return _reduced(total, row_targets != ignore_index, reduction)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORED, reduction: str = "mean") -> Tensor:
    """As :func:`linear_cross_entropy`, of logits ``(..., V)`` that are there already."""
    check_targets(targets, logits.shape[:-1], reduction)
    rows = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    classes = targets.flatten().to(torch.int64)
    has_loss = classes != ignore_index
    if may_look(classes):
        _check_range(classes[has_loss], logits.shape[-1])
    return _reduced(F.cross_entropy(rows, classes, ignore_index=ignore_index, reduction="sum"), has_loss, reduction)


def _reduced(total: Tensor, has_loss: Tensor, reduction: str) -> Tensor:
    """Give the sum of the rows' losses, or their mean: NaN where no row has one, with a gradient of 0."""
    count = has_loss.sum()
    return total if reduction == "sum" else torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def check_targets(targets: Tensor, shape: Sequence[int], reduction: str) -> None:
    """Demand targets of a shape, and a reduction that there is; errors as of :func:`linear_cross_entropy`."""
    check_choice("reduction", reduction, ("mean", "sum"))
    check_tensor("targets", targets, shape, dtype=getattr(targets, "dtype", None))
    if targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"targets: expected dtype torch.int32 or torch.int64, got {targets.dtype}")


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Give the dtype in which ``torch.nn.functional.linear`` would multiply here."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def rows_at_once(vocab_size: int, itemsize: int) -> int:
    """Count the rows of a chunk: their logits as multiplied, in ``itemsize`` bytes, and in fp32 fit the workspace."""
    entry = itemsize if itemsize >= 4 else itemsize + 4
    rows = max(1, WORKSPACE_BYTES // (entry * vocab_size))
    return rows // 128 * 128 or rows  # whole tiles of a matrix product


@opaque_operator("linear_cross_entropy")
def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the sum of the losses, and its gradients or in their place no numbers."""
    ignored = (targets == ignore_index)[:, None]
    if targets.device.type == "cpu":
        _check_range(targets[~ignored[:, 0]], len(weight))
    classes = targets.to(torch.int64)[:, None].masked_fill(ignored, 0)
    wide = torch.promote_types(dtype, torch.float32)
    total = hidden.new_zeros((), dtype=wide)
    grad_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape if weight_grad else 0, dtype=torch.promote_types(wide, weight.dtype))
    factor = weight.to(dtype)
    size = rows_at_once(len(weight), dtype.itemsize)
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        x = hidden[rows].to(dtype)
        scores = (x @ factor.mT).to(wide)
        total += _normalise(scores, classes[rows], ignored[rows])
        narrow = scores.to(dtype)
        if hidden_grad:
            grad_hidden[rows] = narrow @ factor
        if not weight_grad:
            continue
        if x.device.type == "cuda" and dtype != wide == grad_weight.dtype:
            torch.addmm(grad_weight, narrow.mT, x, out_dtype=wide, out=grad_weight)
        else:
            grad_weight.addmm_(scores.to(grad_weight.dtype).mT, x.to(grad_weight.dtype))
    return total, grad_hidden, grad_weight


def _normalise(scores: Tensor, classes: Tensor, ignored: Tensor) -> Tensor:
    """Give the sum of the rows' losses, and put its gradient in place of the scores."""
    scores.sub_(scores.amax(-1, keepdim=True))
    log_prob = scores.gather(-1, classes)
    normaliser = scores.exp_().sum(-1, keepdim=True)
    log_prob -= normaliser.log()
    scores.div_(normaliser).scatter_(-1, classes, log_prob.expm1()).masked_fill_(ignored, 0)
    return -log_prob.masked_fill_(ignored, 0).sum()


@opaque_operator("linear_cross_entropy_backward")
def _scaled(grad_loss: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Give ``grad_loss * gradient``, rounded once."""
    # A number is rounded to the dtype of what it multiplies; a tensor with dimensions is not.
    out = torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, grad_loss.view([1] * gradient.dim()), out=out)


@_loss_and_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    ignore_index: int,  # noqa: ARG001
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0),
        weight.new_empty(weight.shape if weight_grad else 0, dtype=torch.promote_types(wide, weight.dtype)),
    )


@_scaled.register_fake
def _(grad_loss: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return torch.empty_like(gradient, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtypes = [x.dtype for x in inputs[:2]]
    ctx.wanted = inputs[-2:]
    ctx.set_materialize_grads(False)  # the gradients are outputs too, and nothing depends on them
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    grads = (_scaled(grad_loss, gradient, dtype) if wanted else None for gradient, dtype, wanted in saved)
    return (*grads, None, None, None, None, None)


_loss_and_gradients.register_autograd(_backward, setup_context=_save)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> None:
    check_tensor("weight", weight, ("V", "D"))
    if not isinstance(hidden, Tensor):
        raise TypeError(f"hidden: expected a tensor (..., {weight.shape[1]}), got {describe(hidden)}")
    check_tensor("hidden", hidden, (*map(str, range(hidden.dim() - 1)), weight.shape[1]))
    check_targets(targets, hidden.shape[:-1], reduction)
    for name, value in (("weight", weight), ("targets", targets)):
        if value.device != hidden.device:
            raise ValueError(f"{name}: expected device {hidden.device}, as hidden has, got {value.device}")


def _check_range(targets: Tensor, vocab_size: int) -> None:
    wrong = targets[(targets < 0) | (targets >= vocab_size)]
    if len(wrong):
        raise ValueError(f"targets: expected 0 to {vocab_size - 1} or ignore_index, got {int(wrong[0])}")
