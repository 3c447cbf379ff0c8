"""The gradients of a model branch by branch, with and without checkpointing and DDP's static graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flexnsa.diagnostics.gradients import trace_gradients
from flexnsa.diagnostics.recipe import Recipe, corpus
from flexnsa.distributed import Ranks, joined_ranks, rank_device
from flexnsa.measure.memory import MIB
from flexnsa.measure.table import format_table


def trace_variants(recipe: Recipe) -> dict[str, Any]:
    """Trace a step of each variant in DDP; a case, of as many ranks as the recipe has."""
    device = rank_device(torch.device(recipe.device))
    with joined_ranks("ddp", device) as ranks:
        traces = []
        for variant, static_graph in _variants(recipe):
            model = ranks.build(variant.make, device).train()
            trace = trace_gradients(model, _loss(variant, ranks, device), ranks=ranks, static_graph=static_graph)
            branches = "+".join(variant.model.branches) if variant.model.attention == "nsa" else "dense"
            settings = {"branches": branches, "checkpointing": variant.model.checkpointing}
            traces.append({**settings, "static_graph": static_graph, **trace.record()})
            del model
    return {"ranks": recipe.ranks, "traces": traces}


def sentence(record: dict[str, Any]) -> str:
    """Say which parameters miss a gradient."""
    traces = record["traces"]
    what = f"{len(traces)} variants on {record['ranks']} rank{'s' * (record['ranks'] > 1)}"
    missing = {(rank, name) for trace in traces for rank, names in trace["missing"].items() for name in names}
    if not missing:
        return f"missing: none; every parameter got its gradient in each of {what}."
    names = ", ".join(sorted({name for _, name in missing}))
    ranks = ", ".join(sorted({str(rank) for rank, _ in missing}))
    return f"missing: {names}, which got no gradient on rank {ranks} in {_count_missing(traces)} of {what}."


def table(record: dict[str, Any]) -> str:
    """Show a line for each variant, then the order of the first: each parameter, and the bucket it travelled in."""
    lines = [
        [
            trace["branches"],
            str(trace["checkpointing"]),
            "yes" if trace["static_graph"] else "no",
            *(str(len(trace[name])) for name in ("arrived", "missing", "zero", "modules", "left_out", "buckets")),
        ]
        for trace in record["traces"]
    ]
    header = ["branches", "checkpointing", "static graph", "arrived", "missing", "all zero", "modules", "left out"]
    return f"{format_table([*header, 'buckets'], lines)}\n\n{_arrivals(record['traces'][0])}"


def has_missing(record: dict[str, Any]) -> bool:
    """Tell whether a parameter has no gradient in any variant."""
    return _count_missing(record["traces"]) > 0


def _count_missing(traces: list[dict[str, Any]]) -> int:
    return sum(bool(trace["missing"]) for trace in traces)


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


def _loss(recipe: Recipe, ranks: Ranks, device: torch.device) -> Callable[[nn.Module], Tensor]:
    """Give the loss of this rank's rows of the first step."""
    config = recipe.training
    rows = corpus(recipe.text, recipe.tokenizer).tokens("train").rows(config.seq_len, config.pack)
    batch = rows.draw(random.Random(f"{config.seed}/0"), config.batch_size * config.grad_accumulation)
    own = batch[ranks.share(len(batch))].to(device)

    def loss(called: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            return called(own.tokens, targets=own.targets, document_ids=own.document_ids)

    return loss
