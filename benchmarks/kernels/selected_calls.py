"""Calls of the selected branch that the benchmark times: their inputs, and clocks and memory of a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import config as functorch

from benchmarks.harness.clock import Clock
from benchmarks.harness.memory import AllocatorProbe
from benchmarks.kernels.selected_plans import Shape, Variant
from flexnsa.attention.flex import branches
from flexnsa.attention.interface import Call
from flexnsa.attention.tiles import selected as tiles
from flexnsa.attention.triton import selected
from flexnsa.attention.triton.kernels import selected_lists
from flexnsa.config import NSAConfig
from flexnsa.lm.measure.memory import MIB
from flexnsa.masks.document import document_positions
from flexnsa.positions import Positions

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
Attention = Callable[..., tuple[Tensor, Tensor | None]]


def config_of(shape: Shape) -> NSAConfig:
    size = shape.block_size
    return NSAConfig(
        compress_block_size=size, compress_stride=size, select_block_size=size, num_selected_blocks=shape.num_selected
    )


def positions_of(shape: Shape) -> Positions | None:
    """Documents of unequal lengths that begin anywhere."""
    if shape.documents == 1:
        return None
    cuts = torch.randperm(shape.length - 1, generator=torch.Generator().manual_seed(0))[: shape.documents - 1] + 1
    ids = torch.zeros(1, shape.length, dtype=torch.int64)
    ids[0, cuts] = 1
    return document_positions(ids.cumsum(1).expand(shape.batch, -1).to(DEVICE), config_of(shape))


def random_selection(shape: Shape, positions: Positions | None, seed: int = 0) -> Tensor:
    """Block 0, the query's own, the one before, and others of its past, evenly."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    where = positions or Positions.of_sequence(shape.length, DEVICE)
    own = (where.token - where.start).expand(shape.batch, -1)[..., None] // shape.block_size
    blocks, n = -(-shape.length // shape.block_size), shape.num_selected
    block = torch.arange(blocks, device=DEVICE)
    chosen = torch.empty(shape.batch, shape.kv_heads, shape.length, n, dtype=torch.int32, device=DEVICE)
    for head in range(shape.kv_heads):
        for first in range(0, shape.length, 4096):
            here = own[:, first : first + 4096]
            worth = torch.rand(*here.shape[:2], blocks, device=DEVICE, generator=generator)
            worth = torch.where((block == 0) | (block == here) | (block == here - 1), 2.0, worth)
            best = worth.masked_fill(block > here, -1.0).topk(min(n, blocks), -1)
            picked = torch.where(best.values < 0, blocks, best.indices).sort(-1).values
            picked = torch.where(picked == blocks, -1, picked).int()
            chosen[:, head, first : first + 4096] = torch.nn.functional.pad(picked, (0, n - picked.shape[-1]), value=-1)
    return chosen


class Inputs:
    """Tensors of one call and the gradients of what it returns."""

    def __init__(self, shape: Shape, dims: tuple[int, int] | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        dk, dv = dims or (shape.dim, shape.dim)
        dtype = dtype if DEVICE == "cuda" else torch.float32  # the interpreter has no products of bfloat16
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(heads: int, dim: int) -> Tensor:
            size = (shape.batch, heads, shape.length, dim)
            return torch.randn(size, device=DEVICE, dtype=dtype, generator=generator).requires_grad_()

        self.qkv = draw(shape.q_heads, dk), draw(shape.kv_heads, dk), draw(shape.kv_heads, dv)
        self.grad_out = draw(shape.q_heads, dv).detach()
        self.positions = positions_of(shape)
        self.block_indices = random_selection(shape, self.positions)
        self.call = Call(config_of(shape), dk**-0.5, positions=self.positions)

    def forward(
        self, attention: Attention, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Out, lse and what to differentiate by."""
        qkv = self.qkv if dtype is None else tuple(x.detach().to(dtype).requires_grad_() for x in self.qkv)
        out, lse = attention(*qkv, self.block_indices, self.call)
        assert lse is not None
        return out, lse, qkv

    def all(self, attention: Attention, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Out, lse and the gradients of q, k, v, lse having one too."""
        out, lse, qkv = self.forward(attention, dtype)
        loss = (out * self.grad_out.to(out.dtype)).sum() + torch.where(lse.isfinite(), lse, 0.0).sin().sum()
        return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(loss, qkv), strict=True))


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("forward", "backward"):
            choose, changes = getattr(tiles, f"{name}_tiles"), getattr(variant, name)

            def chosen(*args: Any, choose: Any = choose, changes: Any = changes) -> Any:
                return replace(choose(*args), **changes)

            stack.enter_context(mock.patch.object(tiles, f"{name}_tiles", chosen))
        for name, value in variant.limits.items():
            stack.enter_context(mock.patch.object(selected, name, value))
        yield


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def warm(job: tuple[Shape, Variant]) -> tuple[Shape, Variant, str]:
    """Compile the kernels of a shape: sizes that they are not compiled for may be small."""
    shape, variant = job
    try:
        with applied(variant):
            x = Inputs(replace(shape, length=min(shape.length, 1024), batch=1))
            out, _, qkv = x.forward(selected.selected)
            torch.autograd.grad(out, qkv, x.grad_out)
            wait()
    except Exception as error:
        return shape, variant, f"{type(error).__name__}: {str(error)[:200]}"
    return shape, variant, ""


def milliseconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time; the second-level cache is flushed before each call."""
    if DEVICE == "cpu":
        call()
        return -1.0
    return round(Clock.of(DEVICE).median(call, repeats, warm_up=1), 3)


def peak(call: Callable[[], object]) -> int:
    """MiB that a call takes above what there was."""
    if DEVICE == "cpu":
        call()
        return -1
    with AllocatorProbe(DEVICE) as probe:
        call()
        probe.mark("call")
    return round(probe.peak["call"] / MIB)


def by_kernel(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel in one call, the longest first."""
    if DEVICE == "cpu":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        wait()
    rows = {event.key[:40]: event.device_time_total / 1e3 for event in profile.key_averages()}
    return {
        name: round(value, 3) for name, value in sorted(rows.items(), key=lambda row: -row[1])[:12] if value > 0.004
    }


def times_of(x: Inputs, attention: Attention, *, brief: bool) -> dict[str, Any]:
    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return x.forward(attention)[:2]

    point: dict[str, Any] = {"forward": milliseconds(forward)}
    out, _, qkv = x.forward(attention)

    def backward() -> object:
        return torch.autograd.grad(out, qkv, x.grad_out, retain_graph=True)

    point["backward"] = milliseconds(backward)
    if not brief:
        point |= {"forward MiB": peak(forward), "backward MiB": peak(backward)}
        point |= {"forward kernels": by_kernel(forward), "backward kernels": by_kernel(backward)}
    return point


def measure_ours(shape: Shape, variant: Variant, *, brief: bool = False) -> dict[str, Any]:
    """Time of lists, forward and backward, memory, and the time of each kernel."""
    x = Inputs(shape)
    with applied(variant):
        point = times_of(x, selected.selected, brief=brief)
        if not brief:
            capacity = selected.capacity_of(shape.q_heads // shape.kv_heads, x.qkv[0].element_size())
            sizes = 1.0, shape.block_size, selected.CHUNK, capacity
            token, start = (None, None) if x.positions is None else (x.positions.token, x.positions.start)
            selection = selected.SelectedInputs(*x.qkv, x.block_indices, token, start, *sizes).selection()
            point["lists"] = milliseconds(lambda: selected_lists.build_lists(selection, selected.CHUNK, capacity))
    return point


def flex(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Any:
    return branches.selected(q, k, v, block_indices, call)


def measure_flex(shape: Shape) -> dict[str, Any]:
    # By default a compiled backward pass reuses the memory of what was saved, so it runs only once.
    with functorch.patch(donated_buffer=False):
        return times_of(Inputs(shape), flex, brief=False)
