"""Cross-entropy of a head that is a plain product with its weight, or of any other module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flexnsa.layers.projection import has_no_hooks, is_dense
from flexnsa.lm.model.loss import cross_entropy, linear_cross_entropy, product_dtype, reduced, rows_at_once
from flexnsa.operators.opaque import in_transform
from flexnsa.packing import IGNORED


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
