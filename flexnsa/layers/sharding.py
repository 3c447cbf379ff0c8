"""Whole values of parameters that may be sharded over ranks, read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter on every rank."""
    return parameter.full_tensor() if _is_sharded(parameter) else parameter


def own(parameter: Tensor) -> Tensor:
    """Return this rank's part of the parameter, with its gradient."""
    return parameter.to_local() if _is_sharded(parameter) else parameter


def write(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter to whole values that every rank has."""
    if _is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        layout = parameter.device_mesh, parameter.placements
        values = distribute_tensor(values.to(parameter.device), *layout, src_data_rank=None)
    parameter.copy_(values)


def _is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    return hasattr(parameter, "device_mesh")
