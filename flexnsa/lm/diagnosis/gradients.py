"""One backward pass: the gradients that arrive, their order, and the buckets in which they are communicated."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from flexnsa.layers.indexer import SelectionLoss
from flexnsa.lm.diagnosis.non_finite import modules_to_watch
from flexnsa.lm.diagnosis.recipe import Recipe
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.measure.table import Report, format_table
from flexnsa.lm.parallel.joining import joined_ranks, rank_device
from flexnsa.lm.parallel.ranks import Ranks
from flexnsa.lm.training.trainer import draw_step, language_loss

STEPS = 3
"""Number of passes. DDP lays its buckets out again after a first step, so the last one is traced."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are communicated together: the names of their parameters, and their size."""

    parameters: list[str]
    bytes: int


@dataclass(frozen=True, slots=True)
class GradientTrace:
    """One backward pass on this rank, and the missing gradients of all ranks.

    Args:
        arrived: parameters in the order in which their gradients were complete.
        missing: parameters that require a gradient and got none, by rank; ranks that miss none are left out.
        zero: parameters whose gradient is all zeros on this rank.
        modules: modules in the order in which their backward ran.
        left_out: modules whose forward ran and whose backward did not.
        buckets: buckets in the order in which they were sent; none without a process group.
    """

    arrived: list[str] = field(default_factory=list)
    missing: dict[int, list[str]] = field(default_factory=dict)
    zero: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def trace_gradients(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], *, ranks: Ranks | None = None, static_graph: bool = False
) -> GradientTrace:
    """Run a model forward and backward, in DDP where there is a process group; all its ranks have to call this.

    Args:
        model: on its device; keeps its parameters, and has no gradients afterwards.
        loss: returns the loss of this rank's sequences, called with the module to call in place of the model.
        ranks: ranks of the group; by default this process alone.
        static_graph: passed to DDP.

    Returns:
        The trace of the last of three passes. Missing gradients are those of a pass without DDP, which would wait for
        them.
    """
    ranks = Ranks() if ranks is None else ranks
    trace = _run(model, model, loss)
    needed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    by_rank = ranks.gather([name for name in needed if name not in trace.arrived])
    missing = {rank: names for rank, names in enumerate(by_rank) if names}
    if not dist.is_initialized():
        return replace(trace, missing=missing)
    unused = bool(missing) and not static_graph
    wrapped = DistributedDataParallel(model, static_graph=static_graph, find_unused_parameters=unused)
    buckets: list[Bucket] = []
    names = {parameter: name for name, parameter in model.named_parameters()}

    def note_bucket(group, bucket):  # without annotations, which DDP would reject
        buckets.append(Bucket([names[parameter] for parameter in bucket.parameters()], bucket.buffer().nbytes))
        return allreduce_hook(group, bucket)

    wrapped.register_comm_hook(None, note_bucket)
    for _ in range(STEPS):
        buckets.clear()
        trace = _run(model, wrapped, loss)
    return replace(trace, missing=missing, buckets=buckets)


def _run(model: nn.Module, called: nn.Module, loss: Callable[[nn.Module], Tensor]) -> GradientTrace:
    model.zero_grad()
    with _recorded(model) as trace:
        loss(called).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return replace(trace, zero=[name for name, x in gradients.items() if x is not None and not x.any()])


@contextmanager
def _recorded(model: nn.Module) -> Iterator[GradientTrace]:
    """Record gradients and modules in the order in which backward reaches them."""
    trace, ran = GradientTrace(), dict[str, None]()

    def note(names: list[str], name: str) -> Callable[..., None]:
        return lambda *_: names.append(name)

    with ExitStack() as hooks, warnings.catch_warnings():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(note(trace.arrived, name)))
        for name, module in modules_to_watch(model):
            if name:
                hooks.enter_context(module.register_forward_hook(lambda *_, name=name: ran.setdefault(name)))
                hooks.enter_context(module.register_full_backward_hook(note(trace.modules, name)))
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # expected of embeddings
        yield trace
    trace.left_out.extend(name for name in ran if name not in trace.modules)


def trace_variants(recipe: Recipe) -> dict[str, Any]:
    """Trace a step of each variant in DDP; a case, on the ranks of the recipe."""
    device = rank_device(torch.device(recipe.device))
    with joined_ranks("ddp", device) as ranks:
        traces = []
        for variant, static_graph in _variants(recipe):
            model = ranks.build(variant.make, device).train()
            loss = _loss_of_step(variant, ranks, device)
            trace = trace_gradients(model, loss, ranks=ranks, static_graph=static_graph)
            branches = "+".join(variant.model.branches) if variant.model.attention == "nsa" else "dense"
            settings = {"branches": branches, "checkpointing": variant.model.checkpointing}
            traces.append({**settings, "static_graph": static_graph, **trace.record()})
            del model
    return {"ranks": recipe.ranks, "traces": traces}


def report_gradients(record: dict[str, Any]) -> Report:
    """Report the parameters that miss a gradient, each variant, and the order and the buckets of the first one."""
    traces = record["traces"]
    variants = f"{len(traces)} variants on {record['ranks']} rank{'s' * (record['ranks'] > 1)}"
    missing = {(rank, name) for trace in traces for rank, names in trace["missing"].items() for name in names}
    sentence = f"missing: none; every parameter got its gradient in each of {variants}."
    if missing:
        names = ", ".join(sorted({name for _, name in missing}))
        ranks = ", ".join(sorted({str(rank) for rank, _ in missing}))
        count = sum(bool(trace["missing"]) for trace in traces)
        sentence = f"missing: {names}, which got no gradient on rank {ranks} in {count} of {variants}."
    header = ["branches", "checkpointing", "static graph", "arrived", "missing", "all zero", "modules", "left out"]
    rows = [
        [
            trace["branches"],
            str(trace["checkpointing"]),
            "yes" if trace["static_graph"] else "no",
            *(str(len(trace[name])) for name in ("arrived", "missing", "zero", "modules", "left_out", "buckets")),
        ]
        for trace in traces
    ]
    table = f"{format_table([*header, 'buckets'], rows)}\n\n{_arrivals(traces[0])}"
    return Report(sentence=sentence, table=table, record=record, passed=not missing)


def _arrivals(trace: dict[str, Any]) -> str:
    buckets = {name: index for index, bucket in enumerate(trace["buckets"]) for name in bucket["parameters"]}
    sizes = [f"{bucket['bytes'] / MIB:.2f}" for bucket in trace["buckets"]]
    rows = [
        [name, str(place), str(buckets[name]), sizes[buckets[name]]] for place, name in enumerate(trace["arrived"], 1)
    ]
    return format_table([f"gradients of {trace['branches']}, as they came", "", "bucket", "its MiB"], rows)


def _variants(recipe: Recipe) -> Iterator[tuple[Recipe, bool]]:
    model = recipe.model
    alone = [(tag,) for tag in model.branches] if model.attention == "nsa" and len(model.branches) > 1 else []
    some = 0 < sum(map(model.is_checkpointed, range(model.num_layers))) < model.num_layers
    layers = ["none", "all", *([model.checkpointing] if some else [])]
    for branches, checkpointing, static_graph in itertools.product([model.branches, *alone], layers, [False, True]):
        yield recipe.at(branches=branches, checkpointing=checkpointing), static_graph


def _loss_of_step(recipe: Recipe, ranks: Ranks, device: torch.device) -> Callable[[nn.Module], Tensor]:
    """Return the loss of this rank's sequences of the first step, as a function of the model."""
    config = recipe.training
    batch = draw_step(recipe.corpus().tokens("train").rows(config.seq_len, config.pack), config, step=0)
    rows = batch[ranks.share(len(batch))].to(device)
    has_indexers = recipe.model.attention == "nsa" and recipe.model.nsa.index_heads is not None

    def loss(called: nn.Module) -> Tensor:
        selection = SelectionLoss(seed=config.seed) if has_indexers else None
        language = language_loss(called, rows, config.precision, selection=selection)
        return language if selection is None else language + config.selection_loss_weight * selection.total

    return loss
