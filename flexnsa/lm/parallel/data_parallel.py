"""Ranks that share the sequences of a batch, or their tokens: each has the whole model (DDP), or shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

from flexnsa.layers.sharding import write
from flexnsa.lm.model.decoder import DecoderLayer, DecoderLM, quick_options
from flexnsa.lm.parallel.agreement import flat, require_same
from flexnsa.lm.parallel.ranks import Ranks, T
from flexnsa.parallel.context_parallel import parallelize_model, shard


class GroupRanks(Ranks):
    """The ranks of torch's default process group.

    Args:
        device: device of this rank.
        reduce_dtype: dtype in which gradients are communicated.
        context_parallel: number of ranks that share the tokens of the same sequences; divides the number of ranks.
    """

    def __init__(self, device: torch.device, reduce_dtype: torch.dtype, context_parallel: int = 1) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.reduce_dtype, self.context_parallel = device, reduce_dtype, context_parallel
        self._row = None
        if context_parallel > 1:
            shape = self.world_size // context_parallel, context_parallel
            self._row = init_device_mesh(device.type, shape, mesh_dim_names=("rows", "tokens"))["tokens"]

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Return the model that ``make`` builds; where ranks share tokens, it takes those of its rank."""
        return self._shard_tokens(self._same(make())).to(device)

    def cut(self, rows: Tensor) -> Tensor:
        """Return this rank's tokens of sequences ``(B, S)``."""
        return rows if self._row is None else shard(rows, self._row)

    def _same(self, model: DecoderLM) -> DecoderLM:
        """Check that the model has the same sizes on all ranks: else they would hang in the sum of a gradient."""
        shapes = {name: f"{tuple(x.shape)} of {x.dtype}" for name, x in _tensors(model).items()}
        self.require_same(lambda: {**model.config.to_dict(), **shapes})
        return model

    def _shard_tokens(self, model: DecoderLM) -> DecoderLM:
        return model if self._row is None else parallelize_model(model, self._row)

    def totals(self, values: Tensor) -> Tensor:
        """Return the sums over the ranks of numbers in fp64."""
        summed = values.to(self.device, copy=True)
        dist.all_reduce(summed)
        return summed

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks in their order, pickled on the way."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def require_same(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Check that all ranks have the same values, by name."""
        require_same(self.gather(flat(values())))

    def collectives(self) -> int:
        """Count the collectives that this rank has started in the default group."""
        group = dist.group.WORLD
        assert group is not None
        return group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]

    def on_all(self, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every rank and return all results; an OSError or a ValueError is raised on all."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = act()
        except (OSError, ValueError) as met:
            error = met
        met_by_rank: list[tuple[Any, Exception | None]] = self.gather((result, error))
        for _, error in met_by_rank:
            if error is not None:
                raise error
        return [value for value, _ in met_by_rank]


class DDPRanks(GroupRanks):
    """Every rank holds the whole model; gradients are averaged during backward."""

    def wrap(self, model: DecoderLM, *, some_unused: bool = False) -> nn.Module:
        """Return the model in :class:`torch.nn.parallel.DistributedDataParallel`."""
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=some_unused)
        if self.reduce_dtype == torch.bfloat16:
            # In a lambda: DDP takes the bare hook, by its name and types, for one of NCCL alone
            wrapped.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
        return wrapped

    def settle(self, backward: Callable[[], object]) -> None:
        """Have DDP lay out its buckets, which it does in the order of the gradients of a first pass.

        The order of sums over more than two ranks depends on the position in a bucket. Without this, the first step of
        a resumed run would sum in another order than the same step of a run without a stop.
        """
        backward()

    def part(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Accumulate gradients on each rank, and average them in the last part."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


class FSDP2Ranks(GroupRanks):
    """Every rank holds a shard of each parameter; a layer's are gathered while it runs.

    Each part of a step scatters its gradients: whole ones would take the memory that shards save.
    """

    sharded = True

    def build(self, make: Callable[[], DecoderLM], device: torch.device) -> DecoderLM:
        """Shard a model that was built without memory, then send the values that rank 0 draws.

        Shards cannot draw their own: with one seed all of them would have the same values.
        """
        with torch.device("meta"):
            model = make()
        model = self._shard_tokens(self._same(model))
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
            dist.broadcast(whole, src=0)
            write(tensor, whole)
        # FSDP begins while all parameters learn: for a layer of which none does it would forget the reduce_dtype
        model._get_fsdp_state()._lazy_init()  # pyright: ignore[reportCallIssue]
        return model

    def compile(self, model: DecoderLM, **options: Any) -> None:
        """Compile the code between FSDP's hooks: with a hook inside a checkpoint nothing would be compiled."""
        forward = torch.compile(DecoderLayer.forward, fullgraph=True, **quick_options(options))
        for layer in model.layers:
            layer.forward = MethodType(forward, layer)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Name parameters and buffers, also those outside checkpoints; shared ones once."""
    return {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())}
