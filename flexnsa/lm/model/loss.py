"""Cross-entropy of a head in linear memory: only as many logits at once as fit a workspace.

A head that does more than multiply is called for slices of its input. Of a plain product with its weight, forward
processes the rows of ``hidden`` in chunks and computes the gradients of a chunk while its logits exist (arXiv
2410.10989, section 3.2). Logits are computed once, and what is kept for backward has the size of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flexnsa.layers.projection import has_no_hooks, is_dense
from flexnsa.operators.opaque import in_transform, opaque_operator
from flexnsa.packing import IGNORED
from flexnsa.primitives import LARGEST_SIZE, check_choice, check_int, check_integers, check_tensor, describe, may_look

WORKSPACE_BYTES = 2**30
"""Upper bound of the bytes of a chunk's logits and their copies."""


def head_cross_entropy(
    head: nn.Module, hidden: Tensor, targets: Tensor, *, vocab_size: int, reduction: str = "mean"
) -> Tensor:
    """Return the cross-entropy of the logits of a head, which are computed in chunks.

    Args:
        head: maps ``(B, T, D)`` to logits ``(B, T, V)``. A plain product with its weight is never called. Any other
            head is called with all of ``hidden``, or where that is more than a chunk, with slices along the sequence,
            in order, and in backward with each slice again.
        hidden: ``(B, S, D)``.
        targets: int64 or int32 ``(B, S)``, each in ``[0, V)`` or -100.
        vocab_size: ``V``, which decides the size of a chunk.
        reduction: as of :func:`linear_cross_entropy`.

    Returns:
        A scalar in nats, fp32 or wider.
    """
    weight: Any = head.weight if only_multiplies(head) else None  # read once: a parametrization computes it each time
    if weight is not None and is_dense(weight):
        return linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    size = rows_at_once(vocab_size, product_dtype(hidden).itemsize)
    if targets.numel() <= size:
        return cross_entropy(head(hidden), targets, reduction=reduction)

    def loss_of(x: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(head(x), classes, reduction="sum")

    # No checkpoint works in a transform of torch.func.
    call: Any = loss_of if in_transform() else partial(checkpoint, loss_of, use_reentrant=False)
    slices = (x.split(max(1, size // len(x)), dim=1) for x in (hidden, targets))
    total = torch.stack([call(x, classes) for x, classes in zip(*slices, strict=True)]).sum()
    return reduced(total, targets != IGNORED, reduction)


def only_multiplies(head: nn.Module) -> bool:
    """Return whether calling a head is a product with its weight, parametrized or not, and nothing else."""
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    return head.bias is None and has_no_hooks(head)  # pyright: ignore[reportUnnecessaryComparison]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = IGNORED, reduction: str = "mean"
) -> Tensor:
    """Return ``cross_entropy(linear(hidden, weight), targets)`` without storing all logits.

    Logits are computed in the dtype of ``hidden``, or in that of autocast where it is on. Their softmax, the loss and
    the weight's gradient are accumulated in fp32 or wider. In addition to :data:`WORKSPACE_BYTES`, forward allocates
    both gradients, the weight's in fp32 or wider, and a copy of the weight where autocast casts it. Backward allocates
    both gradients once more.

    Args:
        hidden: ``(..., D)``, any floating dtype.
        weight: ``(V, D)``, of the dtype of ``hidden``; under autocast, any dtype that it casts to the same.
        targets: int64 or int32 ``(...)``, each in ``[0, V)`` or ``ignore_index``.
        ignore_index: the target of tokens without a loss.
        reduction: ``"mean"`` over the tokens that have a loss, NaN with gradients 0 if none has; or ``"sum"``.

    Returns:
        A scalar in nats, fp32 or wider; it can be differentiated once.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: an argument does not fit the others, or (checked on a CPU only) a target is out of range.
    """
    check_int("ignore_index", ignore_index, -LARGEST_SIZE)
    _check(hidden, weight, targets, reduction)
    dtype = product_dtype(hidden)
    if product_dtype(weight) != dtype:
        raise ValueError(f"weight: expected dtype {hidden.dtype}, as hidden has, got {weight.dtype}")
    row_targets = targets.flatten()
    rows = hidden.reshape(len(row_targets), hidden.shape[-1])
    needs_grad = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    total, *_ = _loss_and_gradients(rows, weight, row_targets, ignore_index, dtype, *needs_grad)
    return reduced(total, row_targets != ignore_index, reduction)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORED, reduction: str = "mean") -> Tensor:
    """Return the loss of :func:`linear_cross_entropy` for given logits ``(..., V)``."""
    check_targets(targets, logits.shape[:-1], reduction)
    classes = targets.flatten().to(torch.int64)
    rows = logits.reshape(len(classes), logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    has_loss = classes != ignore_index
    if may_look(classes):
        _check_range(classes[has_loss], logits.shape[-1])
    return reduced(F.cross_entropy(rows, classes, ignore_index=ignore_index, reduction="sum"), has_loss, reduction)


def reduced(total: Tensor, has_loss: Tensor, reduction: str) -> Tensor:
    """Return the sum of the losses, or their mean: NaN, with gradient 0, where no token has a loss."""
    count = has_loss.sum()
    return total if reduction == "sum" else torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def check_targets(targets: Tensor, shape: Sequence[int], reduction: str) -> None:
    """Check that ``targets`` are integers of a shape and ``reduction`` is known; see :func:`linear_cross_entropy`."""
    check_choice("reduction", reduction, ("mean", "sum"))
    check_integers("targets", targets, shape)


def product_dtype(factor: Tensor) -> torch.dtype:
    """Return the dtype in which ``torch.nn.functional.linear`` would multiply ``factor``, autocast considered."""
    device = factor.device.type
    autocast = torch.is_autocast_enabled(device) and factor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else factor.dtype


def rows_at_once(vocab_size: int, itemsize: int) -> int:
    """Return the rows of a chunk: their logits, in ``itemsize`` bytes and again in fp32, fit the workspace."""
    entry = itemsize if itemsize >= 4 else itemsize + 4
    rows = max(1, WORKSPACE_BYTES // (entry * max(1, vocab_size)))
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
    """Return the sum of the losses and its two gradients; one that is not wanted is empty."""
    ignored = (targets == ignore_index)[:, None]
    if targets.device.type == "cpu":
        _check_range(targets[~ignored[:, 0]], len(weight))
    classes = targets.to(torch.int64)[:, None].masked_fill(ignored, 0)
    total, grad_hidden, grad_weight = _new_results(hidden, weight, dtype, hidden_grad, weight_grad)
    wide, factor = total.dtype, weight.to(dtype)
    size = rows_at_once(len(weight), dtype.itemsize)
    if len(weight) == 0:  # with an empty vocabulary no token has a loss
        return total, grad_hidden.zero_(), grad_weight
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
    """Return the sum of the losses, and overwrite the scores with its gradient."""
    scores.sub_(scores.amax(-1, keepdim=True))
    log_prob = scores.gather(-1, classes)
    normaliser = scores.exp_().sum(-1, keepdim=True)
    log_prob -= normaliser.log()
    scores.div_(normaliser).scatter_(-1, classes, log_prob.expm1()).masked_fill_(ignored, 0)
    return -log_prob.masked_fill_(ignored, 0).sum()


@opaque_operator("linear_cross_entropy_backward")
def _scaled(grad_loss: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad_loss * gradient``, rounded once."""
    # PyTorch rounds a 0-dim factor to the dtype of the other factor first; one with dimensions it does not.
    out = torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, grad_loss.view([1] * gradient.dim()), out=out)


def _new_results(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate a sum and its gradients; those that are added up are 0."""
    wide = torch.promote_types(dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    grad_weight = weight.new_zeros(weight.shape if weight_grad else 0, dtype=torch.promote_types(wide, weight.dtype))
    return hidden.new_zeros((), dtype=wide), grad_hidden, grad_weight


_loss_and_gradients.register_fake(lambda hidden, weight, *rest: _new_results(hidden, weight, *rest[2:]))


@_scaled.register_fake
def _(grad_loss: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    return torch.empty_like(gradient, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtypes = [x.dtype for x in inputs[:2]]
    ctx.needs_grad = inputs[-2:]
    ctx.set_materialize_grads(False)  # the gradients are outputs too, but never used: materialising zeros costs memory
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad_loss: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_grad, strict=True)
    grads = (_scaled(grad_loss, gradient, dtype) if needs_grad else None for gradient, dtype, needs_grad in saved)
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
        expected = (
            f"0 to {vocab_size - 1} or ignore_index" if vocab_size else "ignore_index alone, without a vocabulary"
        )
        raise ValueError(f"targets: expected {expected}, got {int(wrong[0])}")
