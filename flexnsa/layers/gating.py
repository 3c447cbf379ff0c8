"""Gates: the weight of each branch in the output of a query head (section 3.2, Eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexnsa.checks.primitives import check_choice
from flexnsa.geometry import BRANCHES
from flexnsa.layers.projection import split_heads

GATES = ("sigmoid", "softmax")


def check_gate(kind: str, num_branches: int) -> None:
    """Check that a kind of gate exists and can weight so many branches."""
    check_choice("gate", kind, GATES)
    if kind == "softmax" and num_branches == 1:
        raise ValueError("gate: expected 'sigmoid' for a single branch, whose share is always 1, got 'softmax'")


class Gate(nn.Module):
    """Gate from the layer input: a linear projection per head and branch, then a sigmoid (the paper's) or a softmax.

    ``(B, S, dim)`` to ``(B, num_heads, S, num_branches)``. Gates start close to 1/2 (sigmoid) or to equal shares
    (softmax) and depend on the input, so that no branch starts closed and every weight has a gradient from the start.
    """

    def __init__(self, dim: int, num_heads: int, num_branches: int, kind: str = "sigmoid") -> None:
        super().__init__()
        check_gate(kind, num_branches)
        self.num_heads = num_heads
        self.kind = kind
        self.linear = nn.Linear(dim, num_heads * num_branches, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, small enough to leave every gate open."""
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return the gates of each head and branch; ``logits`` is the projection of x, if it is computed already."""
        each = split_heads(self.linear(x) if logits is None else logits, self.num_heads)
        return each.sigmoid() if self.kind == "sigmoid" else each.softmax(-1)


def in_columns(gates: Mapping[str, Tensor]) -> Tensor:
    """Stack the gates of branches ``(B, Hq, T)`` as columns, ``(B, Hq, T, 3)``; a missing branch has 0."""
    shut = torch.zeros_like(next(iter(gates.values())))
    return torch.stack([gates.get(tag, shut) for tag in BRANCHES], dim=-1)
