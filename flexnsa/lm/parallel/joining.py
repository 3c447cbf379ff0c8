"""Joining the processes that torchrun started."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

import flexnsa
from flexnsa.lm.parallel.agreement import REFUSED, RanksDifferError, flat, require_same_in_store
from flexnsa.lm.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PARALLEL = ("ddp", "fsdp2")
"""Ways to train on several processes: every rank holds the whole model, or a shard of each parameter."""

REDUCE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes in which gradients are summed over ranks; in fp16 those of gates and compressors would underflow."""

REFUSAL_SECONDS = 60.0
"""Time that a rank with wrong options waits for the others, to send them the reason."""

_SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_world_size() -> int:
    """Count the processes that were started together.

    Raises:
        ValueError: neither torchrun nor anything that sets the same variables started this one.
    """
    missing = [name for name in _SET_BY_TORCHRUN if not os.environ.get(name)]
    if missing:
        raise ValueError(f"parallel: expected a start by torchrun, which sets {', '.join(missing)}; got none of that")
    return int(os.environ["WORLD_SIZE"])


def launch_variables(num_ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets, for each rank of processes on this machine; a free port is chosen."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def count_launched() -> int:
    """Count the processes that torchrun started together; 1 for a process that it did not start."""
    return launched_world_size() if all(os.environ.get(name) for name in _SET_BY_TORCHRUN) else 1


def rank_device(device: torch.device) -> torch.device:
    """Return the device of this process: the GPU of its local rank.

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
    parallel: str | None,
    device: torch.device,
    reduce_dtype: str = "fp32",
    context_parallel: int = 1,
    *,
    same: Mapping[str, Any] | None = None,
) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for as long as the context lasts.

    Args:
        parallel: one of :data:`PARALLEL`, or None for a single process.
        device: device of :func:`rank_device`; NCCL joins GPUs, gloo CPUs.
        reduce_dtype: one of :data:`REDUCE_DTYPES`.
        context_parallel: number of ranks that share the tokens of the same sequences; divides their number.
        same: values that JSON can hold, by name, or mappings of such, which have to be the same on all ranks. The
            other arguments, but for the index of a device, and the versions of flexnsa and PyTorch are compared too.

    Delete every reference to a wrapped model before the context ends.

    Raises:
        RanksDifferError: a value differs; raised on all ranks, before they join.
    """
    if parallel is None:
        yield Ranks()
        return
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from flexnsa.lm.parallel.data_parallel import DDPRanks, FSDP2Ranks

    versions = {"flexnsa": flexnsa.__version__, "torch": str(torch.__version__)}
    joining = _joining(parallel, reduce_dtype, context_parallel)
    # Before there is a group: ranks with other backends or sizes would not find each other
    store, rank, world_size = _compared(flat({**joining, "device": device.type, **versions, **(same or {})}))
    options: dict[str, Any] = {"store": PrefixStore("group", store), "rank": rank, "world_size": world_size}
    if device.type == "cpu":
        dist.init_process_group("gloo", **options)
    else:
        torch.get_device_module(device).set_device(device)
        dist.init_process_group(f"cpu:gloo,{device.type}:nccl", **options)
    kind = {"ddp": DDPRanks, "fsdp2": FSDP2Ranks}[parallel]
    yield kind(device, REDUCE_DTYPES[reduce_dtype], context_parallel)
    # A model that outlived the group would wait for its threads with Python locked
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def refused_together(parallel: str | None, reduce_dtype: str = "fp32", context_parallel: int = 1) -> Iterator[None]:
    """End all processes that torchrun started when one of them raises an error inside the context.

    Otherwise the others would wait in :func:`joined_ranks`, which takes the same arguments, for a rank that has ended.
    The errors are those caught below, or a ``SystemExit`` with a reason, such as a package that is not installed.

    Raises:
        RanksDifferError: other ranks have other arguments, or end for another reason; names them.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, SystemExit) as error:
        if count_launched() > 1:
            reason = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename}: {error.strerror}"
            try:
                refusal = {**_joining(parallel, reduce_dtype, context_parallel), REFUSED: reason}
                _compared(refusal, timedelta(seconds=REFUSAL_SECONDS))
            except RanksDifferError as difference:
                if str(difference) != reason:
                    raise difference from error
            except RuntimeError:  # the others do not answer
                pass
        raise


def _joining(parallel: str | None, reduce_dtype: str, context_parallel: int) -> dict[str, Any]:
    return {"parallel": parallel, "context_parallel": context_parallel, "reduce_dtype": reduce_dtype}


def _compared(values: Mapping[str, Any], timeout: timedelta | None = None) -> tuple[Store, int, int]:
    """Return the store of the processes that torchrun started, this rank and their number, if their values agree."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store, rank, world_size = next(rendezvous("env://", **options))
    require_same_in_store(PrefixStore("flexnsa", store), rank, world_size, values)
    return store, rank, world_size
