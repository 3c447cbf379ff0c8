"""Calls of the branches in Triton, on a GPU or in the process of Triton's interpreter."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.memory import saved_for_backward
from flexnsa import NativeSparseAttention
from flexnsa.attention.interface import Call, Implementation, Keys
from flexnsa.config import BRANCHES, num_compressed
from flexnsa.masks.positions import Positions
from flexnsa.mods import ScoreMod, soft_cap
from flexnsa.operators.checkpointing import keep_selection
from tests.support.compiled import PARTITIONED
from tests.support.gluon import hopper_on_a_cpu
from tests.support.inputs import SMALL
from tests.support.triton_cases import CASES, Case


def run(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Call the operator, forward and backward; on a GPU also tell whether repeated calls have the same bits."""
    from flexnsa.attention.dispatch import TRITON
    from flexnsa.attention.tiles import intervals
    from flexnsa.attention.tiles import selected as tiles
    from flexnsa.attention.triton import selected
    from flexnsa.attention.triton.kernels import selected_lists

    def choose(*_: object) -> tiles.Tiles:
        return tiles.Tiles(case.rows, 16, 4, 1)

    with ExitStack() as stack:
        for name, value in case.limits:
            stack.enter_context(mock.patch.object(selected_lists if name == "SCRATCH_BYTES" else selected, name, value))
        programs = stack.enter_context(hopper_on_a_cpu()) if case.hopper and device == "cpu" else {}
        if device == "cpu":  # the interpreter is the faster, the more rows it takes at a time
            from flexnsa.attention.triton.kernels import selected_bwd, selected_fwd

            stack.enter_context(mock.patch.multiple(tiles, forward_tiles=choose, backward_tiles=choose))
            stack.enter_context(mock.patch.object(intervals, "SMALLER", (tiles.Tiles(64, 64, 4, 1),) * 2))
            for module in (selected_fwd, selected_bwd):
                stack.enter_context(mock.patch.object(module, "SUM_ROWS", 512))
        # Programs of the interpreter come one after the other: there a second call could not differ.
        calls = [case] * (1 if device == "cpu" else 3) + [replace(case, recompute=())] * bool(case.recompute)
        first, *others = (attend(TRITON, call, device=device) for call in calls)
    assert device != "cpu" or {*case.hopper} == {name for name, program in programs.items() if program.launches}
    same = all(torch.equal(x, other[name]) for other in others for name, x in first.items())
    return {"results": {name: x.cpu() for name, x in first.items()}, "same": same, "on_gpu": device != "cpu"}


def attend(
    implementation: Implementation, case: Case, dtype: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, Tensor]:
    """Out, lse and the gradients of q, k and v by one implementation, at ``dtype`` or that of the case.

    Those of gates in place of lse for a gated sum.
    """
    from flexnsa.attention import dispatch

    x = case.tensors(device)
    chosen, grad_lse = x.pop("block_indices"), x.pop("grad_lse")
    x = {name: value if dtype is None else value.to(dtype) for name, value in x.items()}
    q, k, v = (x[name].detach().requires_grad_() for name in ("q", "k", "v"))
    where = case.positions()
    where = where and where.map(lambda p: p.to(device))
    call = Call(case.config, case.factor, case.mod, where, where)
    if case.gates:
        gates = x["gates"].detach().requires_grad_()
        given = {tag: gate for tag, gate in dispatch.by_branch(gates).items() if tag != case.ungated}
        given["win"] = given["win"].contiguous() if len(case.documents) > 1 else given["win"]  # the others are not
        keys = sum(num_compressed(length, case.config) for length in case.documents)
        branches = Keys(k[:, :, :keys], v[:, :, :keys], k, v, -k, v.square())
        tags = BRANCHES if case.window_size else ("cmp", "slc")
        options: dict[str, Any] = {"block_indices": chosen, "branches": tags, "recompute": case.recompute}
        out, _ = dispatch.attend(implementation, q, branches, given, call, nonnegative=True, **options)
        grads = torch.autograd.grad(out, (q, k, v, gates), x["grad_out"])
        return {"out": out.detach()} | dict(zip(("dq", "dk", "dv", "dgates"), grads, strict=True))
    if case.compressed:
        out, lse, _ = implementation.compressed(q, k, v, call)
    elif case.window_size is not None:
        out, lse = implementation.window(q, k, v, call)
    else:
        out, lse = implementation.selected(q, k, v, chosen, call)
    assert lse is not None
    real = case.real(device)  # what others give means nothing
    out, lse = torch.where(real[..., None], out, 0.0), torch.where(real, lse, 0.0)
    seen = lse > -torch.inf
    loss = (torch.where(seen, lse, 0.0) * grad_lse.to(lse.dtype)).sum()
    if not case.lse_only:
        loss = loss + (out.to(lse.dtype) * x["grad_out"].to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, (q, k, v), materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def compile_operator() -> dict[str, Any]:
    """Trace selection, and forward and backward of branches, once for several lengths, of one chunk and of two.

    Once more with documents, of given blocks, and with soft caps.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    from flexnsa.attention.triton import intervals, selected, selection

    counter, config = CompileCounterWithBackend("aot_eager"), CASES["gated"].config

    def call(q: Tensor, k: Tensor, k_cmp: Tensor, given: Tensor, token: Tensor | None, mod: ScoreMod | None) -> Tensor:
        where = None if token is None else Positions(token, torch.zeros_like(token), token)
        shared = Call(config, 0.5, mod, where, where)
        q = q * 1.0
        chosen = selection.select_blocks_triton(q, k_cmp, None, shared) if where is None else given
        both = selected.selected(q, k, k, chosen, shared), intervals.window(q, k, k, shared)
        return torch.cat([torch.cat([out.square(), lse[..., None]], -1) for out, lse in both if lse is not None]).sum()

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    same, graphs = [], []
    for positioned, cap in ((False, False), (True, False), (False, True)):
        counter.clear()
        for length in (18, 43):
            q = torch.randn(2, 2, length, 16, requires_grad=True)
            k = torch.randn(2, 1, length, 16, requires_grad=True)
            k_cmp = torch.randn(2, 1, num_compressed(length, config), 16, requires_grad=True)
            given = torch.zeros(2, 1, length, 4, dtype=torch.int32) - torch.tensor([0, 1, 1, 1], dtype=torch.int32)
            token = torch.arange(length, dtype=torch.int32)[None] if positioned else None
            with mock.patch.object(selected, "CHUNK", 32):
                x = q, k, k_cmp, given, token, soft_cap(2.0) if cap else None
                gradients = [torch.autograd.grad(f(*x), (q, k)) for f in (compiled, call)]
            same += [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]
        graphs.append(counter.frame_count)
    return {"same": all(same), "graphs": graphs}


def recompute_outputs(impl: str, way: str) -> dict[str, Any]:
    """Tell how many outputs a layer does not keep if one or two are computed again, and whether gradients are equal."""
    saved, gradients, tokens = [], [], torch.randn(1, 60, 32)
    for tags in ((), ("win",), ("cmp", "win")):
        torch.manual_seed(0)
        layer = NativeSparseAttention(32, 2, 1, 16, config=SMALL, gate="residual", impl=impl, recompute=tags)
        called: Any = layer
        if way == "compiled":
            called = torch.compile(layer, fullgraph=True, backend=PARTITIONED)
        elif way == "checkpointed":
            called = partial(checkpoint, layer, use_reentrant=False, context_fn=keep_selection)
        with saved_for_backward(list(layer.parameters())) as held:
            out = called(tokens)
        saved.append(held.total)
        gradients.append(torch.autograd.grad(out.square().sum(), list(layer.parameters())))
    same = (torch.equal(x, y) for others in gradients for x, y in zip(gradients[0], others, strict=True))
    return {"same": all(same), "fewer": [(saved[0] - x) // (4 * 2 * 60 * 16) for x in saved[1:]]}


def interpret(name: str, device: str = "cpu") -> dict[str, Any]:
    """Run a case, the compiled operators, or layers of an implementation that recompute in some way."""
    if name.startswith("recompute "):
        return recompute_outputs(*name.split()[1:])
    return compile_operator() if name == "compiled" else run(CASES[name], device)
