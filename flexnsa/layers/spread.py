"""Parameters that may be spread over ranks, read and written whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole(parameter: Tensor) -> Tensor:
    """Give all of a parameter, on every rank."""
    return parameter.full_tensor() if _is_spread(parameter) else parameter


def write(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter to values that every rank has."""
    if _is_spread(parameter):
        from torch.distributed.tensor import distribute_tensor

        place = parameter.device_mesh, parameter.placements
        values = distribute_tensor(values.to(parameter.device), *place, src_data_rank=None)
    parameter.copy_(values)


def _is_spread(parameter: Tensor) -> TypeGuard[DTensor]:
    return hasattr(parameter, "device_mesh")
