"""What the kernels that take a whole step make of every case and of what is out of the ordinary, in an interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention, NSACache
from tests.support.inputs import TINY
from tests.support.triton_decoding import ALONE, CASES, Case, run


def run_over_the_end() -> dict[str, Any]:
    """Run steps of two sequences, one of them full, without the check that a compiled step cannot make."""
    case = Case(steps=((2, 2),), prompts=(9, 3))
    layer, x = case.layer(), case.tokens()
    cache = layer.new_cache(2, 10, max_rewind=2)
    layer.impl = "reference"
    layer(x[:, :9], cache=cache, lengths=torch.tensor(case.prompts))
    whole = layer(x)
    layer.impl = "triton"
    with mock.patch.object(NSACache, "check_room"):
        out = layer(x[torch.arange(2)[:, None], torch.tensor([[9, 10], [3, 4]])], cache=cache)
    return {"out": out, "whole": torch.stack([whole[0, 9:11], whole[1, 3:5]]), "lengths": cache.lengths.tolist()}


def run_compiled() -> dict[str, Any]:
    """Compile a step once and take seven, beside eager ones."""
    from torch._dynamo.testing import CompileCounterWithBackend

    case = Case(steps=ALONE * 7, prompts=(7,))
    layer, x = case.layer(), case.tokens()
    layer.impl = "triton"
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    caches = [layer.new_cache(1, x.shape[1]) for _ in range(2)]
    same = []
    for t in range(7):
        eager, graph = (
            step(x[:, t : t + 1], cache=cache) for step, cache in zip((layer, compiled), caches, strict=True)
        )
        same.append(torch.equal(eager, graph))
    kept = all(torch.equal(caches[0].buffers[name], caches[1].buffers[name]) for name in caches[0].buffers)
    return {"same": all(same) and kept, "graphs": counter.frame_count}


def run_lengths_apart() -> dict[str, list[list[int]]]:
    """Run a step with lengths that are not contiguous, and return the lengths of the sequences after it."""
    case = Case(steps=ALONE, prompts=(7, 7, 7))
    layer, x = case.layer(), case.tokens()
    layer.impl = "triton"
    apart = {"one for all": torch.tensor(1).expand(3), "a column": torch.tensor([[1, 9], [0, 9], [1, 9]])[:, 0]}
    found: dict[str, list[list[int]]] = {}
    for name, lengths in apart.items():
        cache = layer.new_cache(3, 8)
        layer(x[:, :1], cache=cache, lengths=lengths)
        found[name] = [lengths.tolist(), cache.lengths.tolist()]
    return found


def run_no_numbers() -> dict[str, Tensor]:
    """Run a draft that is NaN in one of two sequences, crop it, and continue."""
    case = Case(steps=ALONE * 3, prompts=(9, 9))
    layer, x = case.layer(), case.tokens()
    cache = layer.new_cache(2, 12, max_rewind=2)
    layer.impl = "reference"
    whole = layer(x)
    layer(x[:, :9], cache=cache)
    layer.impl = "triton"
    broken = x[:, 9:11].clone()
    broken[1] = torch.nan
    draft = layer(broken, cache=cache)
    cache.crop(9)
    after = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(9, 12)], dim=1)
    return {"whole": whole[:, 9:], "draft": draft, "after": after}


def run_follower() -> dict[str, Tensor]:
    """Run steps of a layer that attends to the blocks of another, with and without the compressed branch."""
    found: dict[str, Tensor] = {}
    for name, branches in (("all", ("cmp", "slc", "win")), ("two", ("slc", "win"))):
        torch.manual_seed(0)
        config = replace(TINY, index_heads=1, num_selected_blocks=4)  # 3 are forced
        layers = [
            NativeSparseAttention(32, 4, 2, 16, config=config, branches=branches, follows=follows)
            for follows in (False, True)
        ]
        x, (leader, follower) = torch.randn(1, 40, 32), layers
        with torch.no_grad():
            leader.impl = follower.impl = "reference"
            whole = follower(x, index=leader(x, return_index=True)[1])
            leader.impl = follower.impl = "triton"
            caches, out = [layer.new_cache(1, 40) for layer in layers], list[Tensor]()
            for part in x.split([33, *[1] * 7], 1):
                _, index = leader(part, cache=caches[0], return_index=True)
                out.append(follower(part, cache=caches[1], index=index))
        found |= {f"{name}, whole": whole, f"{name}, steps": torch.cat(out, 1)}
    return found


OTHERS = {
    "a layer that follows": run_follower,
    "over the end": run_over_the_end,
    "compiled": run_compiled,
    "lengths apart": run_lengths_apart,
    "no numbers": run_no_numbers,
}


def interpret(name: str, device: str = "cpu") -> dict[str, Any]:
    """Run a case, or what is out of the ordinary."""
    if device != "cpu":
        return run(CASES[name], device)
    torch.use_deterministic_algorithms(True)  # memory to which nobody wrote is then no number
    try:
        return OTHERS[name]() if name in OTHERS else run(CASES[name])
    finally:
        torch.use_deterministic_algorithms(False)
