"""Whether decoding on this device gives what the whole sequence gives, before anybody times it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.graphs import capture
from flexnsa import NativeSparseAttention, NSACache, NSAConfig

SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
LENGTHS = (150, 61, 9)


def check_decoding(device: str, impl: str, steps: int = 12) -> dict[str, Any]:
    """Decode after prompts of different lengths, fp32, and compare with the oracle on whole sequences.

    Returns:
        The largest errors of steps and of graph replays, and whether both are at most ``1e-5``.
    """
    torch.manual_seed(0)
    layer = NativeSparseAttention(64, 16, 2, 32, config=SMALL, impl=impl).to(device).requires_grad_(False)
    x = torch.randn(len(LENGTHS), max(LENGTHS) + steps, 64, device=device)
    layer.impl = "reference"
    whole = layer(x)
    cache = prefilled(layer, x)
    layer.impl = impl
    report: dict[str, Any] = {"eager": _error(layer, cache, x, whole, steps)}
    if device == "cuda":
        layer.impl = "reference"
        cache = prefilled(layer, x)
        layer.impl = impl
        compiled = torch.compile(layer, fullgraph=True, dynamic=False)
        report["graph"] = _error(captured(compiled, cache, x[:, :1].clone()), cache, x, whole, steps)
    return report | {"ok": max(report.values()) <= 1e-5}


def prefilled(layer: NativeSparseAttention, x: Tensor) -> NSACache:
    """Put prompts of different lengths in a new cache."""
    cache = layer.new_cache(*x.shape[:2])
    layer(x[:, : max(LENGTHS)], cache=cache, lengths=torch.tensor(LENGTHS, device=x.device))
    return cache


def captured(step: Any, cache: NSACache, now: Tensor) -> Any:
    """Capture a step in a CUDA graph; the cache is then as it was."""
    before = cache.state_dict()
    replay_graph, out = capture(lambda: step(now, cache=cache))
    cache.load_state_dict(before)

    def replay(x: Tensor, cache: NSACache) -> Tensor:  # noqa: ARG001
        now.copy_(x)
        replay_graph()
        return out

    return replay


def _error(step: Any, cache: NSACache, x: Tensor, whole: Tensor, steps: int) -> float:
    rows, first = torch.arange(len(x), device=x.device), torch.tensor(LENGTHS, device=x.device)
    errors = []
    for count in range(steps):
        out = step(x[rows, first + count][:, None], cache=cache)
        errors.append((out[:, 0] - whole[rows, first + count]).abs().max())
    return float(torch.stack(errors).max())
