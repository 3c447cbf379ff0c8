"""The loss of a model whose head is sharded over two ranks, or has a hook there, and of the same model on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flexnsa import loss
from flexnsa.lm import DecoderLM
from flexnsa.lm.parallel import joined_ranks
from tests.parallel.steps import CPU, MODEL, whole

Wrap = Callable[[DecoderLM, DeviceMesh], nn.Module]


def shard_all(model: DecoderLM, mesh: DeviceMesh) -> nn.Module:
    """Shard the head along with what is outside of the layers."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_head(model: DecoderLM, mesh: DeviceMesh, *, keep: bool) -> nn.Module:
    """Shard the head on its own; ``keep`` has it stay whole from forward to backward."""
    fully_shard(model.head, mesh=mesh, reshard_after_forward=not keep)
    return shard_all(model, mesh)


def split_head(model: DecoderLM, mesh: DeviceMesh) -> nn.Module:
    """Have each rank compute the logits of some tokens of the vocabulary."""
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


WAYS: dict[str, Wrap] = {
    "whole on every rank": lambda model, _: DistributedDataParallel(model),
    "sharded with the rest": shard_all,
    "sharded on its own": lambda model, mesh: shard_head(model, mesh, keep=False),
    "sharded on its own, kept whole": lambda model, mesh: shard_head(model, mesh, keep=True),
    "split by vocabulary": split_head,
}
CHUNKS: dict[str, int] = {"one chunk": 2**30, "several chunks": 17 * 2 * 4 * MODEL.vocab_size}


def cap(_head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
    """Keep logits within bounds, as a soft cap does."""
    return 2 * (logits * 10).tanh()


def learn(model: nn.Module, named: DecoderLM) -> dict[str, Tensor]:
    """Return the loss of a pass, and the gradients of two that add up."""
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1).masked_fill(tokens < 40, -100)
    value = model(tokens, targets=targets)
    value.backward()
    model(tokens, targets=targets).backward()
    return {"loss": value.detach()} | {
        name: whole(p.grad) for name, p in named.named_parameters() if p.grad is not None
    }


def build(*, capped: bool) -> DecoderLM:
    """Build the same model on every rank."""
    torch.manual_seed(3)
    model = DecoderLM(MODEL).train()
    if capped:
        model.head.register_forward_hook(cap)
    return model


def compare_heads(file: Path) -> None:
    """Learn in each way, and on one rank; save what rank 0 has seen."""
    results: dict[tuple[str, ...], Any] = {}
    with joined_ranks("ddp", CPU) as ranks:
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        for hook in ("plain", "capped"):
            alone = build(capped=hook == "capped")
            results[hook,] = learn(alone, alone)
            for chunks, workspace in CHUNKS.items():
                loss.WORKSPACE_BYTES = workspace
                for way, wrap in WAYS.items():
                    model = build(capped=hook == "capped")
                    results[hook, chunks, way] = learn(wrap(model, mesh), model)
            loss.WORKSPACE_BYTES = 2**30
        if ranks.rank == 0:
            torch.save(results, file)
