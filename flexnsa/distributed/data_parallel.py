"""Ranks that share the rows of a batch, or rows and tokens: each with the whole model (DDP), or shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from flexnsa.distributed.context_parallel import parallelize_model, shard
from flexnsa.distributed.ranks import Ranks
from flexnsa.layers.spread import write
from flexnsa.models import DecoderLM
from flexnsa.models.decoder import DecoderLayer


class GroupRanks(Ranks):
    """The ranks of torch's default process group.

    Args:
        device: of this rank.
        reduce_dtype: in which gradients travel.
        context_parallel: so many ranks share the tokens of the same rows; divides the number of ranks.
    """

    def __init__(self, device: torch.device, reduce_dtype: torch.dtype, context_parallel: int = 1) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.reduce_dtype, self.context_parallel = device, reduce_dtype, context_parallel
        self._row = None
        if context_parallel > 1:
            shape = self.world_size // context_parallel, context_parallel
            self._row = init_device_mesh(device.type, shape, mesh_dim_names=("rows", "tokens"))["tokens"]

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Give the model that ``make`` gives; where ranks share tokens, it takes those of its rank."""
        return self._spread(make()).to(device)

    def cut(self, rows: Tensor) -> Tensor:
        """Give this rank's tokens of rows ``(B, S)``."""
        return rows if self._row is None else shard(rows, self._row)

    def _spread(self, model: DecoderLM) -> DecoderLM:
        return model if self._row is None else parallelize_model(model, self._row)

    def total(self, value: float) -> float:
        """Sum over the ranks, the same on all."""
        summed = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return summed.item()

    def largest(self, number: int) -> int:
        """Give the largest of the ranks' numbers."""
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def gather(self, value: object) -> list[Any]:
        """Give the values of all ranks in their order; they travel pickled."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def collectives(self) -> int:
        """Count the collectives that this rank has begun in the default group."""
        group = dist.group.WORLD
        assert group is not None
        return group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]

    def on_first(self, act: Callable[[], object]) -> None:
        """Have rank 0 act while the others wait; an error that names a file or an argument is raised on all."""
        errors: list[Exception | None] = [None]
        if self.rank == 0:
            try:
                act()
            except (OSError, ValueError) as error:
                errors = [error]
        dist.broadcast_object_list(errors)
        if errors[0] is not None:
            raise errors[0]


class DDPRanks(GroupRanks):
    """Every rank holds the whole model; gradients are averaged while backward goes on."""

    def wrap(self, model: DecoderLM) -> nn.Module:
        """Give the model in :class:`torch.nn.parallel.DistributedDataParallel`."""
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.reduce_dtype == torch.bfloat16:
            # By its own name, and with its types, DDP takes the hook for one of NCCL alone.
            wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return wrapped

    def settle(self, backward: Callable[[], object]) -> None:
        """Have DDP lay out its buckets, which it does in the order in which a first pass gives gradients.

        How numbers of more than two ranks are added depends on their place in a bucket. A run that goes on from a
        checkpoint would else add those of its first step in another order than the run that went on without a stop.
        """
        backward()

    def part(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Let gradients add up on each rank before the last part, and average them with it."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


class FSDP2Ranks(GroupRanks):
    """Every rank holds a shard of each parameter; a layer's are gathered while it runs.

    Each part of a step scatters its gradients: added up unscattered, they would take the memory that shards save.
    """

    sharded = True

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Shard a model that was made without memory, then hand out the values that rank 0 draws.

        A shard cannot draw its own: with one seed all shards would hold the same numbers.
        """
        with torch.device("meta"):
            model = self._spread(make())
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (self.world_size,)),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype),
        }
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        model.to_empty(device=device)
        drawn = _tensors(make()) if self.rank == 0 else {}
        for name, tensor in _tensors(model).items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if self.rank == 0:
                whole.copy_(drawn[name])
            # Not scattered: what has another size on rank 0 looks to the watchdog like another collective.
            dist.broadcast(whole, src=0)
            write(tensor, whole)
        return model

    def compile(self, model: DecoderLM, **options: Any) -> None:
        """Compile what runs between FSDP's hooks: a compiler that met one in a checkpoint would compile nothing."""
        forward = torch.compile(DecoderLayer.forward, fullgraph=True, **options)
        for layer in model.layers:
            layer.forward = MethodType(forward, layer)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name parameters and buffers, also those of no checkpoint; what modules share, once."""
    return {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
