"""How a process that torchrun started finds the others."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexnsa.distributed.ranks import Ranks

PARALLEL = ("ddp", "fsdp2")
"""Ways to train on several processes: every rank holds the whole model, or a shard of each parameter."""

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes in which gradients are summed over ranks; in fp16 those of gates and compressors would underflow."""

_SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_world_size() -> int:
    """Count the processes that were started together.

    Raises:
        ValueError: this one was not started by torchrun, or by something that sets the same variables.
    """
    missing = [name for name in _SET_BY_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise ValueError(f"parallel: expected a start by torchrun, which sets {', '.join(missing)}; got none of that")
    return int(os.environ["WORLD_SIZE"])


def rank_device(device: torch.device) -> torch.device:
    """Give the device of this process: of the GPUs of its machine, the one of its number there.

    Raises:
        ValueError: one device was named for all, or the machine has fewer GPUs than processes.
    """
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ValueError(f"device: expected {device.type}, of which each process takes its own, got {str(device)!r}")
    index, count = int(os.environ["LOCAL_RANK"]), torch.get_device_module(device).device_count()
    if index >= count:
        raise ValueError(f"device: expected a GPU for each process of a machine, got {count} for process {index}")
    return torch.device(device.type, index)


@contextmanager
def joined_ranks(
    parallel: str | None, device: torch.device, reduce_dtype: str = "fp32", context_parallel: int = 1
) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the context lasts.

    Args:
        parallel: of :data:`PARALLEL`, or None for a process on its own.
        device: of :func:`rank_device`; NCCL joins GPUs, gloo CPUs.
        reduce_dtype: of :data:`REDUCE_DTYPES`.
        context_parallel: so many processes share the tokens of the same rows; divides their number.

    What holds a wrapped model has to be gone when the context ends.
    """
    if parallel is None:
        yield Ranks()
        return
    import torch.distributed as dist

    from flexnsa.distributed.data_parallel import DDPRanks, FSDP2Ranks

    if device.type == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.get_device_module(device).set_device(device)
        dist.init_process_group(f"cpu:gloo,{device.type}:nccl")
    kind = {"ddp": DDPRanks, "fsdp2": FSDP2Ranks}[parallel]
    yield kind(device, REDUCE_DTYPES[reduce_dtype], context_parallel)
    # A model that outlived the group would take its threads with it, and wait for them with Python locked.
    gc.collect()
    dist.destroy_process_group()
