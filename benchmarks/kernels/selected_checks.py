"""Whether the selected branch in Triton is right on a device: against float64, twice, compiled, and at great length."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness.check import relative_error
from benchmarks.kernels.selected_calls import DEVICE, Inputs, config_of, wait
from benchmarks.kernels.selected_plans import Shape
from flexnsa.attention import reference
from flexnsa.attention.interface import Call, given
from flexnsa.attention.triton import selected
from flexnsa.positions import Positions

SAMPLES: dict[str, dict[str, Any]] = {
    "bf16 G16": {"group": 16, "dims": (128, 128)},
    "bf16 G6 D64 batch 2": {"group": 6, "dims": (64, 64), "batch": 2},
    "bf16 G16 documents": {"group": 16, "dims": (128, 128), "documents": 9},
    "bf16 G4": {"group": 4, "dims": (128, 128)},
    "bf16 G1": {"group": 1, "dims": (128, 128)},
    "bf16 G8 192/128": {"group": 8, "dims": (192, 128)},
    "fp32 G4": {"group": 4, "dims": (64, 64), "dtype": torch.float32},
    "fp32 G4 128 documents": {"group": 4, "dims": (128, 128), "dtype": torch.float32, "documents": 5},
    "fp16 G2 80/96": {"group": 2, "dims": (80, 96), "dtype": torch.float16},
    "bf16 G32 256": {"group": 32, "dims": (256, 256)},
    "bf16 G3 blocks of 32": {"group": 3, "dims": (64, 64), "block_size": 32},
    "bf16 G5 blocks of 128": {"group": 5, "dims": (128, 128), "block_size": 128},
    "fp32 G2 192/128 blocks of 16": {"group": 2, "dims": (192, 128), "dtype": torch.float32, "block_size": 16},
    "bf16 G80": {"group": 80, "dims": (64, 64)},
}


def checked_samples(*, smoke: bool) -> list[str]:
    return list(SAMPLES)[:3] if smoke else list(SAMPLES)


def check_sample(name: str) -> dict[str, Any]:
    """Return errors relative to float64 with those of plain PyTorch, and whether a second run had equal bits."""
    sample = {"block_size": 64, "batch": 1, "documents": 1, "dtype": torch.bfloat16} | SAMPLES[name]
    smoke = DEVICE == "cpu"
    shape = Shape(
        name,
        130 if smoke else 1999,
        sample["group"] * (1 if smoke else 2),
        1 if smoke else 2,
        batch=sample["batch"],
        block_size=sample["block_size"],
        num_selected=3 if smoke else 8,
        documents=sample["documents"],
    )
    x = Inputs(shape, sample["dims"], sample["dtype"])
    with mock.patch.multiple(selected, CHUNK=512, LEAST_CHUNK=256, LIST_ROWS=1024):
        ours, again = (x.all(selected.selected) for _ in range(2))
    exact, plain = (x.all(reference.selected, dtype) for dtype in (torch.float64, None))
    point: dict[str, Any] = {"repeats": all(torch.equal(ours[key], again[key]) for key in ours)}
    point["right"] = point["repeats"]
    for key, truth in {key: x.detach() for key, x in exact.items()}.items():
        some = truth.isfinite()
        error, plain_error = (relative_error(y[key][some], truth[some]) for y in (ours, plain))
        factor = 2 if key in ("out", "lse") else 3
        point["right"] &= torch.equal(some, ours[key].isfinite()) and error <= factor * plain_error + 5e-7
        point[key] = f"{error:.1e} (plain {plain_error:.1e})"
    return point


def check_compiled(*, smoke: bool) -> dict[str, Any]:
    """Compile one graph, forward and backward, for all lengths; equal bits to eager calls."""

    def call(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, token: Tensor | None) -> Tensor:
        where = None if token is None else Positions(token, torch.zeros_like(token), token)
        out, lse = selected.selected(q * 2, k, v, chosen, Call(config, 0.1, positions=where))
        return out.float().square().sum() + given(lse).sum()

    same = []
    for positioned in (False, True):
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager" if smoke else "inductor")
        for number, length in enumerate((96, 128, 160) if smoke else (640, 1000, 2048)):
            shape = Shape("", length, 4, 2, 16 if smoke else 64, batch=2, num_selected=4)
            config, x = config_of(shape), Inputs(shape)
            token = torch.arange(length, dtype=torch.int32, device=DEVICE)[None] if positioned else None
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                grads = torch.autograd.grad(compiled(*x.qkv, x.block_indices, token), x.qkv)
            eager = torch.autograd.grad(call(*x.qkv, x.block_indices, token), x.qkv)
            same += [torch.equal(a, b) for a, b in zip(grads, eager, strict=True)]
    return {"right": all(same)}


def check_long(length: int, *, smoke: bool) -> dict[str, Any]:
    """Compare sampled queries and keys of 64 / 4 heads of 128 with a direct computation in float64."""
    shape = Shape("long", length, 64, 4)
    shape = shape.small(length) if smoke else shape
    x = Inputs(shape)
    start = time.perf_counter()
    out, lse, qkv = x.forward(selected.selected)
    grads = torch.autograd.grad(out, qkv, x.grad_out)
    wait()
    point: dict[str, Any] = {"seconds": time.perf_counter() - start}
    if DEVICE == "cuda":
        point["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    size, scale, group = shape.block_size, x.call.scale, shape.q_heads // shape.kv_heads
    errors: dict[str, list[float]] = {"out": [], "lse": [], "dq": [], "dk": [], "dv": []}

    def add(key: str, got: Tensor, truth: Tensor) -> None:
        errors[key].append(relative_error(got, truth))

    heads = range(shape.kv_heads)
    q, k, v = (y.detach() for y in qkv)
    for head in (0, heads[-1]):
        rows = slice(head * group, (head + 1) * group)
        for t in (length - 1, length // 2 + 1, size + 3):
            chosen = x.block_indices[0, head, t].long()
            keys = (chosen[chosen >= 0, None] * size + torch.arange(size, device=DEVICE)).flatten()
            keys = keys[keys <= t]
            qt, kt, vt, grad = (
                y.double() for y in (q[0, rows, t], k[0, head, keys], v[0, head, keys], x.grad_out[0, rows, t])
            )
            scores = qt @ kt.T * scale
            p = scores.softmax(-1)
            add("out", out[0, rows, t], p @ vt)
            add("lse", lse[0, rows, t], scores.logsumexp(-1))
            ds = p * (grad @ vt.T - (grad * (p @ vt)).sum(-1, keepdim=True))
            add("dq", grads[0][0, rows, t], ds @ kt * scale)
        for block in (-(-length // size) - 1, length // size // 2, 1):
            queries = (x.block_indices[0, head] == block).any(-1).nonzero().flatten()
            keys = torch.arange(block * size, min(block * size + size, length), device=DEVICE)
            qt, grad, ot = (y[0, rows][:, queries].double() for y in (q, x.grad_out, out.detach()))
            kt, vt = k[0, head, keys].double(), v[0, head, keys].double()
            p = (qt @ kt.T * scale - lse[0, rows][:, queries, None].double()).exp() * (keys <= queries[:, None])
            ds = p * (grad @ vt.T - (grad * ot).sum(-1, keepdim=True))
            add("dk", grads[1][0, head, keys], (ds.mT @ qt).sum(0) * scale)
            add("dv", grads[2][0, head, keys], (p.mT @ grad).sum(0))
    return (
        point
        | {key: f"{max(values):.1e}" for key, values in errors.items()}
        | {"right": all(value < 1e-2 for values in errors.values() for value in values)}
    )
