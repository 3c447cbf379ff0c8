"""That several GPUs compute what one does: each errs no further from a higher precision than one GPU may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed.together import Point, Together
from benchmarks.harness.check import relative_error
from benchmarks.harness.setting import TINY_MODEL, Setting
from flexnsa import NativeSparseAttention
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.parallel.context_parallel import parallelize_attention, parallelize_model, shard, unshard

HIGHER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
Results = dict[str, Tensor]
MODEL = DecoderConfig(dim=1024, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=64)


def layer_check(together: Together, setting: Setting, length: int) -> None:
    """Check a layer with its tokens sharded: output and every gradient, against the setting's own implementation."""

    def learn(dtype: torch.dtype, *, sharded: bool, impl: str = setting.impl) -> Results:
        torch.manual_seed(0)
        layer = NativeSparseAttention(*setting.heads, config=setting.config, impl=impl)
        x, upstream = (torch.randn(1, length, setting.heads[0]) for _ in range(2))
        layer, x, upstream = layer.to(together.device, dtype), *(y.to(together.device, dtype) for y in (x, upstream))
        if sharded:
            parallelize_attention(layer, together.mesh)
            x, upstream = shard(x, together.mesh), shard(upstream, together.mesh)
        x.requires_grad_()
        out = layer(x)
        out.backward(upstream)
        assert x.grad is not None
        results = {"out": out.detach(), "x": x.grad}
        if sharded:
            results = {name: unshard(value, together.mesh) for name, value in results.items()}
        for name, p in layer.named_parameters():
            assert p.grad is not None
            results[name] = p.grad.double()
            if sharded:
                dist.all_reduce(results[name])
        return results

    yardstick: list[Results] = []
    for impl in dict.fromkeys((setting.impl, "flex" if together.device.type == "cuda" else setting.impl)):

        def measure(impl: str = impl) -> Point:
            if not yardstick:
                yardstick.extend(learn(dtype, sharded=False) for dtype in (HIGHER[setting.dtype], setting.dtype))
            return compare(learn(setting.dtype, sharded=True, impl=impl), yardstick[1], yardstick[0])

        together.point({"kind": "check", "name": f"layer, {impl}, tokens spread", "seq_len": length}, measure)


def step_checks(together: Together, length: int, *, tiny: bool) -> None:
    """Check a step of a small model: every gradient, and record the losses of all ranks, of one GPU, and exact."""
    size, mesh, config = together.ranks.world_size, together.mesh, TINY_MODEL if tiny else MODEL
    cuda = together.device.type == "cuda"
    draws = torch.Generator().manual_seed(1)
    text = torch.randint(256, (size, length + 1), generator=draws).to(together.device)

    def build() -> DecoderLM:
        torch.manual_seed(0)
        return DecoderLM(config).to(together.device).train()

    def learn(model: nn.Module, tokens: Tensor, targets: Tensor, ranks: int = 1, *, exact: bool = False) -> Results:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda and not exact):
            loss = model(tokens, targets=targets, reduction="sum") / (size * length)
        (loss * ranks).backward()
        total = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(total)
        results = {}
        losses.append(total.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            results[name.removeprefix("module.")] = (
                p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            ).double()
        return results

    def of_rows(x: Tensor) -> Tensor:
        return x[mesh.get_local_rank()][None]

    def of_tokens(x: Tensor) -> Tensor:
        return shard(x, mesh)

    def sharded(model: DecoderLM) -> DecoderLM:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    ways: dict[str, tuple[Callable[[DecoderLM], nn.Module], Callable[[Tensor], Tensor]]] = {
        "DDP": (DistributedDataParallel, of_rows),
        "FSDP2": (sharded, of_rows),
        "DDP, tokens spread": (lambda model: DistributedDataParallel(parallelize_model(model, mesh)), of_tokens),
        "FSDP2, tokens spread": (lambda model: sharded(parallelize_model(model, mesh)), of_tokens),
    }
    tokens, targets = text[:, :-1], text[:, 1:]
    yardstick: list[Results] = []
    losses: list[float] = []
    for name, (wrap, part) in ways.items():

        def measure(
            wrap: Callable[[DecoderLM], nn.Module] = wrap, part: Callable[[Tensor], Tensor] = part
        ) -> dict[str, Any]:
            if not yardstick:
                higher = build() if cuda else copy.deepcopy(build()).double()
                yardstick.extend([learn(higher, tokens, targets, exact=True), learn(build(), tokens, targets)])
            results = learn(wrap(build()), part(tokens), part(targets), size)
            return compare(results, yardstick[1], yardstick[0]) | {"losses": [losses[-1], losses[1], losses[0]]}

        together.point({"kind": "check", "name": f"step, {name}", "seq_len": length}, measure)


def compare(results: Results, single: Results, exact: Results) -> Point:
    """Return whether all errors are small, and those of the worst tensor: of several processes, and of one.

    Errors are those of :func:`relative_error`.
    """
    assert results.keys() == exact.keys()
    errors = {name: (relative_error(results[name], x), relative_error(single[name], x)) for name, x in exact.items()}
    largest = {name: (2 if name == "out" else 3) * error + 1e-6 for name, (_, error) in errors.items()}
    worst = max(errors, key=lambda name: errors[name][0] / largest[name])
    holds = all(error <= largest[name] for name, (error, _) in errors.items())
    return {"holds": holds, "worst": worst, "of allowed": errors[worst][0] / largest[worst], "errors": errors[worst]}
