"""The library's modules as torchtitan's: built, initialised and sharded by its protocol."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

WHOLE = dense_param_placement(tp=spmd.R)
"""Layout of a parameter that every rank of tensor parallelism has."""
OF_HEADS = dense_param_placement(tp=spmd.S(0))
"""Layout of a parameter of which each rank has the rows of its own heads."""


def local(x: Tensor) -> Tensor:
    """Return this rank's part of what tensor parallelism shards, and any other tensor as it is.

    Each rank computes with its own heads only. So what it gets as the gradient of a tensor that all ranks have is a
    part of a sum.
    """
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial() if isinstance(at, Replicate) else at for at in x.placements])


def as_heads(x: Tensor, like: Tensor) -> Tensor:
    """Declare ``x (B, T, heads...)`` to be of this rank's heads, where tensor parallelism shards ``like`` too."""
    return DTensor.from_local(x, like.device_mesh, [Shard(2)], run_check=False) if isinstance(like, DTensor) else x


def adopt(module: nn.Module, layout: SpmdLayout = WHOLE) -> None:
    """Make a module of plain classes, and those below it, follow torchtitan's protocol; ``layout`` is of parameters."""
    for child in module.modules():
        if not isinstance(child, Module):
            child.__class__ = _adopted(type(child))
            own = [name for name, _ in child.named_parameters(recurse=False)]
            cast("Module", child)._sharding_config = ShardingConfig(state_shardings=dict.fromkeys(own, layout))


class LocalModule(Module):
    """Mixin of a module that computes with this rank's part of its parameters."""

    def forward(self, *inputs: Any) -> Any:
        """Run the module's own ``forward``."""
        own = dict(self.named_parameters(recurse=False))
        if any(isinstance(parameter, DTensor) for parameter in own.values()):
            return functional_call(self, {name: local(parameter) for name, parameter in own.items()}, inputs)
        return super().forward(*inputs)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def _adopted(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (LocalModule, kind), {})
