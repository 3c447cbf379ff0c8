"""A layer and a model whose tokens are sharded over ranks, and the same with whole sequences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from flexnsa import NativeSparseAttention, SelectionLoss
from flexnsa.lm import DecoderLM
from flexnsa.lm.parallel.data_parallel import DDPRanks, FSDP2Ranks, GroupRanks
from flexnsa.parallel.context_parallel import parallelize_attention, parallelize_model, shard, unshard
from tests.parallel.steps import CPU, MODEL, messages, saved_results, train
from tests.support.decoding import taught
from tests.support.inputs import SMALL, TINY

ROW = 256
"""Tokens: of four ranks each has two chunks of 32, which is more than the window of 24."""
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"v_head_dim": 12},
    "blocks that do not overlap": {"config": replace(SMALL, compress_block_size=4), "compression": "linear"},
    "long blocks": {"config": replace(SMALL, compress_block_size=16), "compression": "mean", "gate": "softmax"},
    "selected alone": {"branches": ("slc",)},
    "recomputed": {"recompute": ("slc", "win")},
    "residual gates, recomputed": {"gate": "residual", "recompute": ("slc",)},
    "shared keys": {"shared_keys": True},
    "window of one token": {"config": replace(SMALL, window_size=1), "branches": ("cmp", "win")},
    "an indexer": {"config": replace(SMALL, index_heads=1, index_block_size=8, index_stride=2)},
    "an indexer of low rank": {
        "config": replace(SMALL, index_heads=3, index_block_size=12, index_stride=4),
        "index_rank": 4,
        "compression": "linear",
    },
    "an indexer whose keys do not overlap": {
        "config": replace(SMALL, index_heads=3, index_block_size=4, index_stride=4),
        "branches": ("slc", "win"),
    },
}
MODS = {"score_mod": "plain", "an indexer, score_mod": "an indexer"}
"""Layers that are given mods, by the name of the case."""
PACKED = {
    f"{name}, packed": name
    for name in ("plain", "selected alone", "window of one token", "an indexer", "an indexer of low rank")
}
"""Layers that are given documents."""
LENGTHS = torch.tensor([[1, 90, 3, 70, 92], [7, 241, 5, 2, 1]])
DOCUMENTS = torch.stack([torch.arange(5).repeat_interleave(row) for row in LENGTHS])
"""Of both rows: some are shorter than a block, one is in all chunks."""


def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.02 * (h + 1)


def make_layer(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return taught(NativeSparseAttention(48, 6, 2, 8, **{"config": SMALL, **options}))


def learn(layer: Any, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return the output, the selection loss, the gradient of the input and those of the parameters."""
    x = x.clone().requires_grad_()
    # Of 2 and of 4 ranks, not all can have as many of the sampled queries
    selection = None if layer.indexer is None else SelectionLoss(seed=3, step=5, num_queries=41)
    out = layer(x, selection=selection, **options)
    selected = torch.zeros(()) if selection is None else torch.as_tensor(selection.total)
    ((out * upstream).sum() + 10 * selected).backward()
    assert x.grad is not None
    results = {"out": out.detach(), "x": x.grad, "selection": selected.detach()}
    return results | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def of_all_ranks(found: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Put together what is of tokens, add up what is of parameters, and list the selection losses of all ranks."""
    results = {}
    for name, value in found.items():
        if name in ("out", "x"):
            results[name] = unshard(value, mesh)
        elif name == "selection":
            results[name] = value.new_empty(mesh.size())
            dist.all_gather_into_tensor(results[name], value.view(1))
        else:
            results[name] = value.clone()
            dist.all_reduce(results[name])
    return results


class Volume(TorchDispatchMode):
    """Counts the numbers that a rank has after gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in func.name():
            self.numbers += result.numel()
        return result


def spread_layer(mesh: DeviceMesh, kind: str) -> NativeSparseAttention:
    return parallelize_attention(make_layer(**LAYERS[kind]), mesh)


def compare(
    mesh: DeviceMesh, kind: str, spread: NativeSparseAttention, *, packed: bool = False, **options: Any
) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Return what is learnt from whole sequences, on rank 0 alone, and from those of the ranks."""
    draws = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, ROW, 48, generator=draws) for _ in range(2))
    ids = {"document_ids": DOCUMENTS} if packed else {}
    whole = {name: option for name, option in options.items() if name != "layout"} | ids
    one = learn(make_layer(**LAYERS[kind]), x, upstream, **whole) if mesh.get_rank() == 0 else None
    options |= {name: shard(of_rows, mesh) for name, of_rows in ids.items()}
    found = learn(spread, shard(x, mesh), shard(upstream, mesh), **options)
    return one, of_all_ranks(found, mesh)


def compare_layers(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the gradients of each layer from whole sequences, and from those of the ranks."""
    results: dict[str, Any] = {name: compare(mesh, name, spread_layer(mesh, name)) for name in LAYERS}
    for name, kind in MODS.items():
        results[name] = compare(mesh, kind, spread_layer(mesh, kind), score_mod=relative)
    for name, kind in PACKED.items():
        results[name] = compare(mesh, kind, spread_layer(mesh, kind), packed=True)
    layer, own = spread_layer(mesh, "plain"), shard(torch.zeros(2, ROW, 48), mesh)
    results["layout"] = compare(mesh, "plain", make_layer(**LAYERS["plain"]), layout=layer.layout(own.shape[1]))
    with Volume() as volume, torch.no_grad():
        make_layer()(own, layout=layer.layout(own.shape[1]))
    results["volume"] = volume.numbers
    return results


def compare_compiled(mesh: DeviceMesh) -> dict[str, Any]:
    """Return what is learnt by a compiled layer, and how many graphs and graph breaks there were."""
    layer = spread_layer(mesh, "an indexer")
    layer.compile(backend="aot_eager", fullgraph=True)
    learnt = compare(mesh, "an indexer", layer, packed=True)
    return {"layer": learnt, "graphs": (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))}


INDEXED: dict[str, Any] = {"nsa": replace(TINY, index_heads=2, index_block_size=4, index_stride=2)}
SHARED: dict[str, Any] = {"nsa": replace(INDEXED["nsa"], num_selected_blocks=5), "share_index": 2}
TRAINED: dict[int, dict[str, tuple[type[GroupRanks], int, dict[str, Any]]]] = {
    2: {
        "fsdp2, 2": (FSDP2Ranks, 2, {"checkpointing": True}),
        "ddp, 2": (DDPRanks, 2, {"batch_size": 2, "grad_accumulation": 2, "pack": True}),
        "ddp, 2, stages": (DDPRanks, 2, {"stages": ((32, 0.5), (64, 0.5))}),
        "fsdp2, 2, an indexer, compiled": (FSDP2Ranks, 2, INDEXED | {"compiled": (0, 1), "checkpointing": True}),
        "fsdp2, 2, a shared index": (FSDP2Ranks, 2, SHARED | {"checkpointing": True, "pack": True}),
        "ddp, 2, an indexer": (DDPRanks, 2, INDEXED | {"batch_size": 2, "grad_accumulation": 2}),
    },
    4: {
        "fsdp2, 2 of 4": (FSDP2Ranks, 2, {}),
        "fsdp2, 4, an indexer": (FSDP2Ranks, 4, INDEXED | {"pack": True}),
        "ddp, 2 of 4, an indexer": (DDPRanks, 2, INDEXED),
    },
}
"""Kind of ranks, how many of them share the tokens of a row, and what is trained."""
TRAINED_ROW = {"seq_len": 64}


def train_all(file: Path) -> None:
    """Take two steps in every way, and save what rank 0 has seen; two ranks compile a layer before."""
    with saved_results(file) as (ranks, results):
        if ranks.world_size == 2:
            results["compiled"] = compare_compiled(init_device_mesh("cpu", (2,)))
        for name, (kind, sharing, options) in TRAINED[ranks.world_size].items():
            results[name] = train(kind(CPU, torch.float32, sharing), TRAINED_ROW | options)


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    layer = parallelize_attention(make_layer(), mesh)
    indexed = parallelize_attention(make_layer(**LAYERS["an indexer"]), mesh)
    coarse = parallelize_attention(make_layer(config=replace(SMALL, index_heads=1, index_stride=8)), mesh)
    calls = {
        "documents": lambda: layer(torch.randn(1, 64, 48), document_ids=(torch.arange(64) >= 16).long()[None]),
        "whole documents": lambda: layer(torch.randn(1, 64, 48), document_ids=DOCUMENTS[:1]),
        "cache": lambda: layer(torch.randn(1, 64, 48), cache=layer.new_cache(1, 64)),
        "short chunks": lambda: layer(torch.randn(1, 40, 48)),
        "index keys cut": lambda: coarse(torch.randn(1, 56, 48)),
        "uneven chunks": lambda: layer(torch.randn(1, 100, 48)),
        "loss of a part": lambda: make_layer(**LAYERS["an indexer"])(
            torch.randn(1, 64, 48), layout=indexed.layout(64), selection=SelectionLoss()
        ),
        "layout": lambda: layer(torch.randn(1, 64, 48), layout=make_layer().layout(64)),
        "again": lambda: parallelize_attention(layer, mesh),
        "model again": lambda: parallelize_model(torch.nn.Sequential(layer), mesh),
        "dense": lambda: parallelize_model(DecoderLM(replace(MODEL, attention="dense")), mesh),
        "shard": lambda: shard(torch.randn(1, 99, 48), mesh),
        "dimension": lambda: unshard(torch.randn(1, 96, 48), mesh, seq_dim=3),
        "mesh": lambda: parallelize_attention(make_layer(), cast("DeviceMesh", None)),
        "model": lambda: parallelize_model(cast("DecoderLM", "layer"), mesh),
        "no layer": lambda: parallelize_model(torch.nn.Linear(2, 2), mesh),
    }
    return messages(calls)


def compare_sequences(file: Path) -> None:
    """Save what rank 0 has seen of all."""
    with saved_results(file) as (ranks, results):
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        x = torch.arange(3.0 * ROW * 5).view(3, ROW, 5)
        results |= {"layers": compare_layers(mesh), "refused": refusals(mesh)}
        results["round trip"] = torch.equal(unshard(shard(x, mesh, seq_dim=1), mesh), x)
