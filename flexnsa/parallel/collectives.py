"""Collectives that have a gradient and stay in the graph of ``torch.compile``: PyTorch has that of the first two."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor


def gather(x: Tensor, size: int, group: str) -> Tensor:
    """Concatenate the ``x (n, ...)`` of ``size`` ranks, ``(size * n, ...)``, on each of them.

    In backward each rank receives the sum of all ranks' gradients of its own x. ``group`` names a process group.
    """
    return wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))


def scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum the ``x (size * n, ...)`` of all ranks, of which the first gets the first ``n``, and so on: ``(n, ...)``.

    In backward each rank receives the gradients of all ranks.
    """
    return wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def total(x: Tensor, group: str) -> Tensor:
    """Sum the x of all ranks, on each of them.

    In backward the gradient is that of the rank's own x. It is not summed, as all ranks go on from the same sum.
    """
    summed = wait_tensor(torch.ops._c10d_functional.all_reduce(x.detach().contiguous(), "sum", group))
    return summed + (x - x.detach())  # 0, with the gradient of x
