"""A model whose heads, or whose head, are spread over ranks, and the same model whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from flexnsa import NativeSparseAttention, SelectionLoss
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.model import loss
from flexnsa.optim import parameter_groups
from flexnsa.parallel.tensor_parallel import clip_gradients, parallelize_attention, parallelize_model
from tests.parallel.steps import MODEL, messages, saved_results, share_keys, whole
from tests.support.decoding import taught
from tests.support.inputs import TINY

HEADS = replace(MODEL, num_heads=8, num_kv_heads=4)
INDEXED = replace(TINY, index_heads=1, index_block_size=4, index_stride=2)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear compression, narrow values": {"compression": "linear", "v_head_dim": 4},
    "mean compression, softmax gates": {"compression": "mean", "gate": "softmax"},
    "residual gates": {"gate": "residual"},
    "checkpointed": {"checkpointing": True},
    "one map of keys for two branches": {"shared_keys": True, "begin_as_mean": True},
    "selected alone": {"branches": ("slc",)},
    "window alone": {"branches": ("win",)},
    "an indexer": {"nsa": INDEXED},
    "an indexer of low rank": {"nsa": replace(INDEXED, index_heads=2), "index_rank": 3, "branches": ("slc", "win")},
    "a shared index": {"nsa": replace(INDEXED, num_selected_blocks=5), "share_index": 2},
    "an indexer, checkpointed": {"nsa": INDEXED, "compression": "linear", "checkpointing": True},
}

ON_FOUR = ("plain", "linear compression, narrow values", "an indexer of low rank", "an indexer, checkpointed")
"""The cases of four ranks, each with a key head."""


def build(config: DecoderConfig) -> DecoderLM:
    torch.manual_seed(3)
    model = DecoderLM(config).train()
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            taught(layer)
    return model


def learn(model: DecoderLM, *, teach: bool = True) -> dict[str, torch.Tensor]:
    """Return the logits, the losses, and every gradient of two passes that add up, the second packed."""
    draws = torch.Generator().manual_seed(5)
    tokens = torch.randint(256, (2, 41), generator=draws)
    ids = (torch.arange(41) >= 17).int().expand(2, -1)
    losses = []
    for step, document_ids in enumerate((None, ids)):
        selection = SelectionLoss(step=step, num_queries=23) if teach and model.config.nsa.index_heads else None
        loss = model(tokens, targets=tokens, document_ids=document_ids, selection=selection)
        selected = torch.zeros(()) if selection is None else torch.as_tensor(selection.total)
        (loss + 2 * selected).backward()
        losses += [loss.detach(), selected.detach()]
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": model(tokens).detach(), "losses": torch.stack(losses)} | gradients


def take_steps(model: DecoderLM, clip: Callable[[DecoderLM], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters after two steps with AdamW, and the norms of their gradients."""
    tokens = torch.randint(256, (2, 41), generator=torch.Generator().manual_seed(5))
    optimizer, norms = torch.optim.AdamW(parameter_groups(model, lr=1e-3)), []
    for _ in range(2):
        model(tokens, targets=tokens).backward()
        norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": torch.stack(norms)} | {name: whole(value).clone() for name, value in model.state_dict().items()}


def compare_cases(file: Path) -> None:
    """Learn in each way, whole and spread, and decode; save what rank 0 has seen."""
    with saved_results(file) as (ranks, results):
        mesh = init_device_mesh("cpu", (ranks.world_size,))

        def alone(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments) if ranks.rank == 0 else None  # the same on every rank

        for name in CASES if ranks.world_size == 2 else ON_FOUR:
            config = replace(HEADS, **CASES[name])
            results[name] = alone(learn, build(config)), learn(parallelize_model(build(config), mesh))
        shared = alone(learn, share_keys(build(HEADS)))
        results["shared keys"] = shared, _spread_in_silence(share_keys(build(HEADS)), mesh)
        results["steps"] = (
            alone(take_steps, build(HEADS), lambda model: clip_grad_norm_(model.parameters(), 0.5)),
            take_steps(parallelize_model(build(HEADS), mesh), lambda model: clip_gradients(model, 0.5)),
        )
        indexed = replace(HEADS, nsa=INDEXED)
        untaught = partial(learn, teach=False)
        models = build(indexed), parallelize_model(build(indexed), mesh)
        results["an indexer that is not taught"] = alone(untaught, models[0]), untaught(models[1])
        prompts = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(1))
        for config in (HEADS, indexed):
            models = build(config).eval(), parallelize_model(build(config), mesh).eval()
            decoded = alone(models[0].generate, prompts, 8), models[1].generate(prompts, 8)
            results[f"decoded, {config.nsa.index_heads}"] = decoded
        results["refused"] = _refusals(mesh)


def _spread_in_silence(model: DecoderLM, mesh: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(action="error"):
        spread = parallelize_model(model, mesh)
    return learn(spread)


def _refusals(mesh: Any) -> dict[str, str]:
    odd = NativeSparseAttention(16, 3, 3, 8, config=TINY)
    spread = parallelize_attention(NativeSparseAttention(16, 8, 4, 8, config=TINY), mesh)
    calls = {
        "heads": lambda: parallelize_attention(odd, mesh),
        "dense": lambda: parallelize_model(build(replace(HEADS, attention="dense")), mesh),
        "again": lambda: parallelize_model(torch.nn.Sequential(spread), mesh),
        "mods": lambda: spread(torch.randn(1, 20, 16), score_mod=lambda score, *_: score),
    }
    return messages(calls)


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


def learn_by_head(model: nn.Module, named: DecoderLM) -> dict[str, Tensor]:
    """Return the loss of a pass, and the gradients of two that add up."""
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1).masked_fill(tokens < 40, -100)
    value = model(tokens, targets=targets)
    value.backward()
    model(tokens, targets=targets).backward()
    return {"loss": value.detach()} | {
        name: whole(p.grad) for name, p in named.named_parameters() if p.grad is not None
    }


def build_with_head(*, capped: bool) -> DecoderLM:
    """Build the same model on every rank."""
    torch.manual_seed(3)
    model = DecoderLM(MODEL).train()
    if capped:
        model.head.register_forward_hook(cap)
    return model


def compare_heads(file: Path) -> None:
    """Learn in each way of the head, and on one rank; save what rank 0 has seen."""
    with saved_results(file) as (ranks, results):
        mesh = init_device_mesh("cpu", (ranks.world_size,))
        for hook in ("plain", "capped"):
            alone = build_with_head(capped=hook == "capped")
            results[hook,] = learn_by_head(alone, alone)
            for chunks, workspace in CHUNKS.items():
                loss.WORKSPACE_BYTES = workspace
                for way, wrap in WAYS.items():
                    model = build_with_head(capped=hook == "capped")
                    results[hook, chunks, way] = learn_by_head(wrap(model, mesh), model)
            loss.WORKSPACE_BYTES = 2**30
