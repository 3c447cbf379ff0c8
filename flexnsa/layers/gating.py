"""Gates: how much of each branch a query head takes (section 3.2, Eq. 5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flexnsa.geometry import BRANCHES
from flexnsa.layers.projection import split_heads
from flexnsa.validation import check_choice

GATES = ("sigmoid", "softmax")


def check_gate(kind: str, num_branches: int) -> None:
    """Demand a kind of gate that can weigh so many branches."""
    check_choice("gate", kind, GATES)
    if kind == "softmax" and num_branches == 1:
        raise ValueError("gate: expected 'sigmoid' for a single branch, whose share is always 1, got 'softmax'")


class Gate(nn.Module):
    """Gate from the layer input: a linear map per head and branch, then a sigmoid (the paper's) or a softmax.

    ``(B, S, dim)`` to ``(B, num_heads, S, num_branches)``. A fresh gate is close to 1/2 (sigmoid) or to equal shares
    (softmax) and depends on its input, so no branch starts shut and every weight has a gradient at once.
    """

    def __init__(self, dim: int, num_heads: int, num_branches: int, kind: str = "sigmoid") -> None:
        super().__init__()
        check_gate(kind, num_branches)
        self.num_heads = num_heads
        self.kind = kind
        self.linear = nn.Linear(dim, num_heads * num_branches, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, small enough to leave every gate open."""
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """Give the gates of each head and branch; ``logits`` is what the linear map gives for x, where it is known."""
        each = split_heads(self.linear(x) if logits is None else logits, self.num_heads)
        return each.sigmoid() if self.kind == "sigmoid" else each.softmax(-1)


def in_columns(gates: Mapping[str, Tensor]) -> Tensor:
    """Put gates of branches ``(B, Hq, T)`` in their columns, ``(B, Hq, T, 3)``; a branch that has none has 0."""
    shut = torch.zeros_like(next(iter(gates.values())))
    return torch.stack([gates.get(tag, shut) for tag in BRANCHES], dim=-1)
