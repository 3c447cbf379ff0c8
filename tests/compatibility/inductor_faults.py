"""Three faults of compilers that flexnsa has to avoid, as a report: ``python tests/compatibility/inductor_faults.py``.

It needs torch alone, prints a line for each fault, and exits with 1 where the installed version has one of them.
"""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_gate: Tensor) -> Tensor:
    """Add up two attentions, each weighted by a part of one sigmoid: ``(B, S, dim)`` to ``(B, H, S, D)``.

    Backward keeps the sigmoid, for its own gradient, and two views of it, for those of the attentions. AOTAutograd
    donates all three buffers, though they share memory. Inductor then writes the gradient of the sigmoid's input over
    the sigmoid, before another kernel reads the views.
    """
    q, k, v, gate = (F.linear(x, w).unflatten(-1, (4, -1)).transpose(1, 2) for w in (w_q, w_k, w_v, w_gate))
    gates = gate.sigmoid().unbind(-1)
    branches = (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for scale in (0.1, 0.2))
    return sum(each[..., None] * out for each, out in zip(gates, branches, strict=True))  # pyright: ignore[reportReturnType]


def donated_views() -> float:
    """Return the relative error of the gradients where a saved activation and views of it are donated."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 70, 32), *(torch.randn(width, 32) / 6 for width in (64, 64, 64, 8))]
    gradients: list[Tensor] = []
    for function in (weighted, torch.compile(weighted)):
        leaves = [inputs[0], *(x.clone().requires_grad_() for x in inputs[1:])]  # the fault needs an x without one
        function(*leaves).square().sum().backward()
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]))
    expected, compiled = gradients
    return float((compiled - expected).norm() / expected.norm())


def divided_range() -> int:
    """Return how many of 70 integers are wrong: on a CPU ``arange(n) // d`` leaves the last ``n % d`` unwritten."""

    def blocks() -> Tensor:
        return torch.arange(70) // 30

    return int((torch.compile(blocks)() != blocks()).sum())


def damaged_views() -> bool:
    """Return whether a cache gets freed memory for the sizes of views, if a graph to train returns two of a product."""
    view = "torch._C._functionalization._unsafe_view_ViewMeta((False, [2, 70, 32]))"
    code = f"import torch; assert {view}.as_tuple() == (False, [2, 70, 32])"  # which may crash the process
    return subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode != 0


if __name__ == "__main__":
    error, wrong, damaged = donated_views(), divided_range(), damaged_views()
    print(f"torch {torch.__version__}")
    print(f"gradients where a saved activation and views of it are donated: off by {error:.1e}, expected below 1e-6")
    print(f"torch.arange(70) // 30: {wrong} of 70 wrong, expected 0")
    print(f"two views of a product in a cache on disk: {'damaged' if damaged else 'whole'}, expected whole")
    sys.exit(error > 1e-6 or wrong > 0 or damaged)
