"""One backward pass: which parameters' gradients arrive, in which order, and in which buckets they travel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from flexnsa.distributed import Ranks

STEPS = 3
"""DDP lays its buckets out anew after a first step, in the order in which gradients came; the last is looked at."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are summed over the ranks together.

    Args:
        parameters: their names.
        bytes: that travel.
    """

    parameters: list[str]
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientTrace:
    """What one backward pass was seen to do on this rank, but for what all ranks tell each other.

    Args:
        arrived: parameters in the order in which their gradients were whole.
        missing: parameters that need a gradient and got none, by rank; ranks that miss none are left out.
        zero: parameters whose gradient is zero everywhere on this rank.
        modules: in the order in which their backward ran.
        left_out: modules whose forward ran and backward did not.
        buckets: in the order in which they were sent; none without a process group.
    """

    arrived: list[str] = field(default_factory=list)
    missing: dict[int, list[str]] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Give plain values."""
        return asdict(self)


def trace_gradients(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    *,
    ranks: Ranks | None = None,
    static_graph: bool = False,
) -> GradientTrace:
    """Run a model forward and backward, in DDP where a process group has been joined; all its ranks together.

    Args:
        model: on its device; keeps its parameters, and is left without gradients.
        loss: given what to call in place of the model; the loss of this rank's rows.
        ranks: of the group; by default this process on its own.
        static_graph: of DDP.

    Returns:
        What was seen in the third of three passes, and what misses in one without DDP, which would wait for it.
    """
    ranks = Ranks() if ranks is None else ranks
    own = _run(model, model, loss)
    missing = {rank: names for rank, names in enumerate(ranks.gather(_missing(model, own))) if names}
    if not dist.is_initialized():
        return _finished(own, missing)
    wrapped = DistributedDataParallel(
        model, static_graph=static_graph, find_unused_parameters=bool(missing) and not static_graph
    )
    buckets: list[Bucket] = []
    names = {parameter: name for name, parameter in model.named_parameters()}

    def note_bucket(group, bucket):  # of no types: DDP would read their names and refuse them
        buckets.append(Bucket([names[parameter] for parameter in bucket.parameters()], bucket.buffer().nbytes))
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, note_bucket)
    trace = own
    for _ in range(STEPS):
        buckets.clear()
        trace = _run(model, wrapped, loss)
    trace.buckets.extend(buckets)
    return _finished(trace, missing)


def _run(model: nn.Module, called: nn.Module, loss: Callable[[nn.Module], Tensor]) -> GradientTrace:
    model.zero_grad()
    with _recorded(model) as trace:
        loss(called).backward()
    trace.zero.extend(
        name for name, parameter in model.named_parameters() if parameter.grad is not None and not parameter.grad.any()
    )
    model.zero_grad()
    return trace


@contextmanager
def _recorded(model: nn.Module) -> Iterator[GradientTrace]:
    """Note gradients and modules as backward comes to them."""
    trace, ran = GradientTrace(), dict[str, None]()

    def note(names: list[str], name: str) -> Callable[..., None]:
        return lambda *_: names.append(name)

    handles = [
        parameter.register_post_accumulate_grad_hook(note(trace.arrived, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(lambda *_, name=name: ran.setdefault(name)))
            handles.append(module.register_full_backward_hook(note(trace.modules, name)))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of embeddings: as it should
            yield trace
    finally:
        for handle in handles:
            handle.remove()
    trace.left_out.extend(name for name in ran if name not in trace.modules)


def _missing(model: nn.Module, trace: GradientTrace) -> list[str]:
    needed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in needed if name not in trace.arrived]


def _finished(trace: GradientTrace, missing: dict[int, list[str]]) -> GradientTrace:
    trace.missing.update(missing)
    return trace
