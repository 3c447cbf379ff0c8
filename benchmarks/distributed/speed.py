"""How fast several GPUs are: a model under DDP and FSDP2, and attention whose tokens are sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed.together import Point, Together
from benchmarks.harness.setting import TINY_MODEL, Setting
from flexnsa import NativeSparseAttention
from flexnsa.attention.dispatch import by_branch
from flexnsa.config import BRANCHES, num_compressed
from flexnsa.layers.core import Heads
from flexnsa.layers.layouts import KeySource, RowKeys
from flexnsa.lm import DecoderConfig, DecoderLM, preset
from flexnsa.lm.measure.memory import MIB
from flexnsa.lm.parallel.data_parallel import FSDP2Ranks
from flexnsa.parallel.context_parallel import parallelize_attention

STEP_TOKENS = 65536
"""Of a step on each GPU."""
LONGEST = 2**21
"""Tokens in all the rounds of a point, if these are more than two."""
Way = Callable[[DecoderConfig, torch.device], tuple[DecoderLM, nn.Module]]
"""Makes a model, and what runs it."""


def training_speed(together: Together, length: int, *, tiny: bool) -> None:
    """Steps of a model and of its dense baseline whose rows are shared: forward, loss, backward and AdamW."""
    config, rows = (TINY_MODEL, 1) if tiny else (preset("m7c-125m", checkpointing=False), STEP_TOKENS // length)
    rows = max(1, rows)
    for attention in ("nsa", "dense"):
        for way, make in WAYS.items():
            ranks = 1 if way == "one GPU" else together.ranks.world_size
            about = {"kind": "training", "model": "tiny" if tiny else "m7c-125m", "attention": attention}
            measure = partial(_steps, together, make, replace(config, attention=attention), (rows, length), ranks)
            together.point(about | {"parallel": way, "seq_len": length, "ranks": ranks}, measure)


def _steps(together: Together, make: Way, config: DecoderConfig, shape: tuple[int, int], ranks: int) -> Point:
    device, (rows, length) = together.device, shape
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, forward = make(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    text = torch.randint(256, (rows, length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = forward(text[:, :-1], targets=text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    milliseconds = together.times(step)[0]
    return {"batch": ranks * rows, "step_ms": milliseconds, "tokens_per_s": ranks * rows * length / milliseconds * 1e3}


def _whole(config: DecoderConfig, device: torch.device) -> tuple[DecoderLM, nn.Module]:
    model = DecoderLM(config).to(device).train()
    if device.type == "cuda":
        model.compile_layers()
    return model, model


def _replicated(config: DecoderConfig, device: torch.device) -> tuple[DecoderLM, nn.Module]:
    model, _ = _whole(config, device)
    return model, DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sharded(config: DecoderConfig, device: torch.device) -> tuple[DecoderLM, nn.Module]:
    ranks = FSDP2Ranks(device, torch.float32)
    model = ranks.build(lambda: DecoderLM(config), device).train()
    if device.type == "cuda":
        ranks.compile(model)
    return model, model


WAYS = {"one GPU": _whole, "DDP": _replicated, "FSDP2": _sharded}


def attention_speed(together: Together, setting: Setting, length: int, *, compiled: bool, sharded: bool) -> None:
    """Attention from projected heads, of a sequence whose tokens are sharded over all GPUs or are on one."""
    ranks = together.ranks.world_size if sharded else 1

    def measure() -> Point:
        torch.manual_seed(together.ranks.rank)
        torch._dynamo.reset()
        local_setting = replace(setting, device=str(together.device))
        layer = NativeSparseAttention(*setting.heads, config=setting.config, impl=setting.impl)
        layer = layer.to(together.device, setting.dtype)
        if sharded:
            parallelize_attention(layer, together.mesh)
        inputs = draw_heads(local_setting, length // ranks)
        attend = attention_of(layer, length // ranks)
        attend = local_setting.compile(attend) if compiled else attend
        learnt = [*inputs.values(), *layer.phi_k.parameters(), *layer.phi_v.parameters()]
        rounds = max(2, min(together.rounds, LONGEST // length))
        point = forward_and_backward(together, lambda: [attend(inputs)], learnt, rounds)
        if sharded:
            moved = forward_and_backward(together, lambda: move_keys(layer, inputs), keys_of(inputs), rounds)
            point |= {"gathered_mib": gathered_numbers(setting, length, ranks) * setting.dtype.itemsize / MIB}
            point |= {f"keys_{name}": value for name, value in moved.items()}
        return point

    together.point({"kind": "attention", "seq_len": length, "ranks": ranks, "compiled": compiled}, measure)


def gathered_numbers(setting: Setting, length: int, ranks: int) -> int:
    """Count what a rank holds of its own and others' keys and values after gathering."""
    config = setting.config
    halos = 2 * ranks * (config.window_size - 1 + config.compress_block_size - config.compress_stride)
    return 2 * setting.num_kv_heads * setting.head_dim * (length + length // config.compress_stride + halos)


def draw_heads(setting: Setting, length: int) -> dict[str, Tensor]:
    """Queries, gates, and keys and values of every branch."""
    heads = {"q": setting.draw(setting.num_heads, length), "gates": setting.draw(setting.num_heads, length, 3)}
    return heads | {f"{kind}_{tag}": setting.draw(setting.num_kv_heads, length) for kind in "kv" for tag in BRANCHES}


def keys_of(inputs: dict[str, Tensor]) -> list[Tensor]:
    return [x for name, x in inputs.items() if name not in ("q", "gates")]


def attention_of(layer: NativeSparseAttention, length: int) -> Callable[[dict[str, Tensor]], Tensor]:
    """The layer without its projections, as a function of :func:`draw_heads`."""
    layout = layer.layout(length)

    def attend(x: dict[str, Tensor]) -> Tensor:
        k, v = ({tag: x[f"{kind}_{tag}"] for tag in BRANCHES} for kind in "kv")
        heads, source = Heads(x["q"], k, v, by_branch(x["gates"])), layout.source or RowKeys()
        return layer.attend(x["q"], heads, layout, source, (None, None), cached=False)[0]

    return attend


def move_keys(layer: NativeSparseAttention, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Have all keys and values travel, and nothing else."""
    source = cast("KeySource", layer.layout(inputs["q"].shape[2]).source)

    def shorten(raw: Tensor) -> Tensor:
        return raw[:, :, : num_compressed(raw.shape[2], layer.config)]

    moved: list[Tensor] = []
    for kind in "kv":
        moved.append(source.of_tokens(f"{kind}_slc", inputs[f"{kind}_slc"]))
        moved.append(source.of_window(f"{kind}_win", inputs[f"{kind}_win"]))
        moved.append(source.of_blocks(f"{kind}_cmp", inputs[f"{kind}_cmp"], shorten))
    return moved


def forward_and_backward(
    together: Together, call: Callable[[], list[Tensor]], learnt: list[Any], rounds: int
) -> dict[str, float]:
    """Milliseconds of both, and seconds of the first call, which may compile."""
    upstream: list[Tensor] = []
    made: list[list[Tensor]] = []

    def forward() -> None:
        made.append(call())

    def backward() -> None:
        torch.autograd.grad(made.pop(), learnt, upstream)

    together.meet()
    begin = together.clock.start()
    forward()
    upstream += [torch.randn_like(x) for x in made[0]]
    backward()
    first = together.clock.since(begin) / 1e3
    forward()
    backward()
    forward_ms, backward_ms = together.times(forward, backward, rounds=rounds)
    return {"first_call_s": first, "forward_ms": forward_ms, "backward_ms": backward_ms}
