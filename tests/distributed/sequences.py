"""A layer and a model whose tokens are spread over ranks, beside the same with whole rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from flexnsa import NativeSparseAttention
from flexnsa.distributed import joined_ranks
from flexnsa.distributed.context_parallel import parallelize_attention, parallelize_model, shard, unshard
from flexnsa.models import DecoderConfig, DecoderLM
from flexnsa.training import TrainConfig
from flexnsa.training.trainer import build_optimizer
from tests.distributed.steps import CPU, MODEL, whole
from tests.support.inputs import SMALL, TINY

ROW = 256
"""Tokens: of four ranks each has two chunks of 32, which is more than the window of 24."""
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"v_head_dim": 12},
    "blocks that do not overlap": {"config": replace(SMALL, compress_block_size=4), "compression": "linear"},
    "long blocks": {"config": replace(SMALL, compress_block_size=16), "compression": "mean", "gate": "softmax"},
    "selected alone": {"branches": ("slc",)},
    "recomputed": {"recompute": ("slc", "win")},
    "window of one token": {"config": replace(SMALL, window_size=1), "branches": ("cmp", "win")},
}
COMPILED = "plain"


def relative(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return score - (q_idx - kv_idx) * 0.02 * (h + 1)


def make_layer(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(48, 6, 2, 8, **{"config": SMALL, **options})


def learn(layer: Any, x: Tensor, upstream: Tensor, **options: Any) -> dict[str, Tensor]:
    """Give the output, the gradient of the input and those of the parameters."""
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
    """Give of each layer what it learns from whole rows and from those of the ranks."""
    draws = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(2, ROW, 48, generator=draws) for _ in range(2))
    own = shard(x, mesh), shard(upstream, mesh)
    results: dict[str, Any] = {}
    for name, options in LAYERS.items():
        want = learn(make_layer(**options), x, upstream)
        results[name] = want, of_all_ranks(learn(parallelize_attention(make_layer(**options), mesh), *own), mesh)
    modded = learn(make_layer(), x, upstream, score_mod=relative)
    layer = parallelize_attention(make_layer(), mesh)
    results["score_mod"] = modded, of_all_ranks(learn(layer, *own, score_mod=relative), mesh)
    with Volume() as volume, torch.no_grad():
        layer(own[0])
    results["volume"] = volume.numbers
    torch.compiler.reset()
    counters.clear()
    layer = parallelize_attention(make_layer(), mesh)
    layer.compile(backend="aot_eager", fullgraph=True)
    results["compiled"] = learn(make_layer(), x, upstream), of_all_ranks(learn(layer, *own), mesh)
    results["graphs"] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return results


MODEL_ROW = 64
MODELS: dict[str, dict[str, Any]] = {"plain": {}, "checkpointed": {"checkpointing": True}}


def build(config: DecoderConfig) -> DecoderLM:
    torch.manual_seed(3)
    return DecoderLM(config).train()


def take_steps(model: DecoderLM, tokens: Tensor, targets: Tensor, count: int, ranks: int) -> dict[str, Tensor]:
    """Give the parameters after four steps, whose loss is the mean over all of ``count`` targets."""
    optimizer = build_optimizer(model, TrainConfig(lr=1e-3))
    losses = []
    for _ in range(4):
        loss = model(tokens, targets=targets, reduction="sum") / count
        (loss * ranks).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(total)
    return {"losses": total} | {name: whole(value).clone() for name, value in model.state_dict().items()}


def compare_models(size: int) -> dict[str, Any]:
    """Give the steps of one process, and those of ranks that share rows by tokens, and by rows and tokens."""
    draws = torch.Generator().manual_seed(5)
    text = torch.randint(256, (2, MODEL_ROW + 1), generator=draws)
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, :20] = -100  # so that ranks have unequal numbers of targets
    count = int((targets != -100).sum())
    results: dict[str, Any] = {}
    for name, options in MODELS.items():
        config = replace(MODEL, nsa=replace(TINY, window_size=8), **options)
        results[name] = {"one": take_steps(build(config), tokens, targets, count, 1)}
        for rows in (1, 2) if size > 2 else (1,):
            mesh = init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("dp", "cp"))
            every = mesh["dp", "cp"]._flatten()
            model = parallelize_model(build(config), mesh["cp"])
            for layer in model.layers:
                fully_shard(layer, mesh=every)
            fully_shard(model, mesh=every)
            share = slice(None) if rows == 1 else slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
            x, y = (shard(x[share], mesh["cp"]) for x in (tokens, targets))
            results[name][f"{rows} x {size // rows}"] = take_steps(model, x, y, count, size)
    return results


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    layer = parallelize_attention(make_layer(), mesh)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    calls = {
        "documents": lambda: layer(torch.randn(1, 64, 48), document_ids=ids),
        "cache": lambda: layer(torch.randn(1, 64, 48), cache=layer.new_cache(1, 64)),
        "short chunks": lambda: layer(torch.randn(1, 40, 48)),
        "uneven chunks": lambda: layer(torch.randn(1, 100, 48)),
        "dense": lambda: parallelize_model(build(replace(MODEL, attention="dense")), mesh),
        "shard": lambda: shard(torch.randn(1, 99, 48), mesh),
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
            "models": compare_models(ranks.world_size),
            "refused": refusals(mesh),
            "round trip": torch.equal(unshard(shard(x, mesh, seq_dim=1), mesh), x),
        }
        if ranks.rank == 0:
            torch.save(results, file)
