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

from flexnsa import NativeSparseAttention
from flexnsa.lm import DecoderLM
from flexnsa.lm.parallel import joined_ranks
from flexnsa.lm.parallel.data_parallel import DDPRanks, FSDP2Ranks, GroupRanks
from flexnsa.parallel.context_parallel import parallelize_attention, parallelize_model, shard, unshard
from tests.parallel.steps import CPU, MODEL, train
from tests.support.inputs import SMALL

ROW = 256
"""Tokens: of four ranks each has two chunks of 32, which is more than the window of 24."""
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"v_head_dim": 12},
    "blocks that do not overlap": {"config": replace(SMALL, compress_block_size=4), "compression": "linear"},
    "long blocks": {"config": replace(SMALL, compress_block_size=16), "compression": "mean", "gate": "softmax"},
    "selected alone": {"branches": ("slc",)},
    "recomputed": {"recompute": ("slc", "win")},
    "shared keys": {"shared_keys": True},
    "window of one token": {"config": replace(SMALL, window_size=1), "branches": ("cmp", "win")},
}
COMPILED = "plain"


def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.02 * (h + 1)


def make_layer(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(48, 6, 2, 8, **{"config": SMALL, **options})


def learn(layer: Any, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return the output, the gradient of the input and those of the parameters."""
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    out.backward(upstream)
    assert x.grad is not None
    results = {"out": out.detach(), "x": x.grad}
    return results | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def of_all_ranks(found: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Put together what is of tokens, and add up what is of parameters."""
    results = {}
    for name, value in found.items():
        if name in ("out", "x"):
            results[name] = unshard(value, mesh)
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


def compare_layers(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the gradients of each layer from whole sequences, and from those of the ranks."""
    draws = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, ROW, 48, generator=draws) for _ in range(2))
    own = shard(x, mesh), shard(upstream, mesh)
    results: dict[str, Any] = {}

    def learn_whole(layer: NativeSparseAttention, **mods: Any) -> dict[str, Tensor] | None:
        """Compute whole sequences on rank 0 alone: they are the same on all ranks."""
        return learn(layer, x, upstream, **mods) if mesh.get_rank() == 0 else None

    for name, options in LAYERS.items():
        layer = parallelize_attention(make_layer(**options), mesh)
        results[name] = learn_whole(make_layer(**options)), of_all_ranks(learn(layer, *own), mesh)
    layer, mods = parallelize_attention(make_layer(), mesh), {"score_mod": relative}
    results["score_mod"] = learn_whole(make_layer(), **mods), of_all_ranks(learn(layer, *own, **mods), mesh)
    given = {"layout": layer.layout(own[0].shape[1])}
    results["layout"] = learn_whole(make_layer()), of_all_ranks(learn(make_layer(), *own, **given), mesh)
    with Volume() as volume, torch.no_grad():
        layer(own[0])
    results["volume"] = volume.numbers
    torch.compiler.reset()
    counters.clear()
    layer = parallelize_attention(make_layer(), mesh)
    layer.compile(backend="aot_eager", fullgraph=True)
    results["compiled"] = learn_whole(make_layer()), of_all_ranks(learn(layer, *own), mesh)
    results["graphs"] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return results


TRAINED: dict[int, dict[str, tuple[type[GroupRanks], int, dict[str, Any]]]] = {
    2: {
        "fsdp2, 2": (FSDP2Ranks, 2, {"checkpointing": True}),
        "fsdp2, 2, compiled": (FSDP2Ranks, 2, {"compiled": True, "checkpointing": True}),
        "ddp, 2": (DDPRanks, 2, {"batch_size": 2, "grad_accumulation": 2}),
    },
    4: {"fsdp2, 4": (FSDP2Ranks, 4, {}), "fsdp2, 2 of 4": (FSDP2Ranks, 2, {}), "ddp, 2 of 4": (DDPRanks, 2, {})},
}
"""Kind of ranks, how many of them share the tokens of a row, and what is trained."""
TRAINED_ROW = {"seq_len": 64}


def train_all(size: int) -> dict[str, Any]:
    """Take four steps in every way."""
    return {
        name: train(kind(CPU, torch.float32, sharing), TRAINED_ROW | options)
        for name, (kind, sharing, options) in TRAINED[size].items()
    }


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    layer = parallelize_attention(make_layer(), mesh)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    calls = {
        "documents": lambda: layer(torch.randn(1, 64, 48), document_ids=ids),
        "cache": lambda: layer(torch.randn(1, 64, 48), cache=layer.new_cache(1, 64)),
        "short chunks": lambda: layer(torch.randn(1, 40, 48)),
        "uneven chunks": lambda: layer(torch.randn(1, 100, 48)),
        "layout": lambda: layer(torch.randn(1, 64, 48), layout=make_layer().layout(64)),
        "dense": lambda: parallelize_model(DecoderLM(replace(MODEL, attention="dense")), mesh),
        "shard": lambda: shard(torch.randn(1, 99, 48), mesh),
        "dimension": lambda: unshard(torch.randn(1, 96, 48), mesh, seq_dim=3),
        "mesh": lambda: parallelize_attention(make_layer(), cast("DeviceMesh", None)),
        "model": lambda: parallelize_model(cast("DecoderLM", "layer"), mesh),
        "no layer": lambda: parallelize_model(torch.nn.Linear(2, 2), mesh),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            said[name] = str(error)
    return said


def compare_sequences(file: Path) -> None:
    """Save what rank 0 has seen of all."""
    with joined_ranks("ddp", CPU) as ranks:
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        x = torch.arange(3.0 * ROW * 5).view(3, ROW, 5)
        results = {
            "layers": compare_layers(mesh),
            "trained": train_all(ranks.world_size),
            "refused": refusals(mesh),
            "round trip": torch.equal(unshard(shard(x, mesh, seq_dim=1), mesh), x),
        }
        if ranks.rank == 0:
            torch.save(results, file)
