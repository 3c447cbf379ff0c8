"""Gates: the weight of each branch in the output of a query head (section 3.2, Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from flexnsa.config import GATES, gated_branches
from flexnsa.layers.projection import split_heads
from flexnsa.primitives import check_choice


def check_gate(kind: str, branches: Sequence[str]) -> None:
    """Check that a kind of gate exists and can weight these branches."""
    check_choice("gate", kind, GATES)
    if kind != "sigmoid" and len(branches) == 1:
        raise ValueError(f"gate: expected 'sigmoid' for a single branch, got {kind!r}")
    if kind == "residual" and "slc" not in branches:
        raise ValueError("gate: expected 'sigmoid' or 'softmax' without the branch slc, got 'residual'")


class Gate(nn.Module):
    """Gate from the layer input: a linear projection per head and branch, then a sigmoid (the paper's) or a softmax.

    ``(B, S, dim)`` to ``(B, num_heads, S)`` for each branch. A branch without an entry has weight 1: with ``residual``
    the selected one, while the others have sigmoid gates. Gates start close to 1/2, or to equal shares (softmax), and
    depend on the input, so that no branch starts closed and every weight has a gradient from the start.
    """

    def __init__(self, dim: int, num_heads: int, branches: Sequence[str], kind: str = "sigmoid") -> None:
        super().__init__()
        check_gate(kind, branches)
        self.num_heads = num_heads
        self.kind = kind
        self.branches = gated_branches(kind, branches)
        self.linear = nn.Linear(dim, num_heads * len(self.branches), bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights, small enough to leave every gate open."""
        nn.init.normal_(self.linear.weight, std=0.02)

    def forward(self, x: Tensor, logits: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gates of each branch; ``logits`` is the projection of x, if it is computed already."""
        return gates_of(self.linear(x) if logits is None else logits, self.num_heads, self.branches, self.kind)


def gates_of(logits: Tensor, num_heads: int, branches: Sequence[str], kind: str = "sigmoid") -> dict[str, Tensor]:
    """Return the gates of each branch ``(B, num_heads, S)`` from ``logits (B, S, num_heads * branches)``.

    Each gate is computed as a tensor of its own. Views of one tensor of all gates would be kept for backward beside
    that tensor, and Inductor then overwrites it before the views are read (tests/compatibility/inductor_faults.py).
    """
    each = split_heads(logits, num_heads)
    if kind == "softmax":
        shares = (each - each.logsumexp(-1, keepdim=True)).unbind(-1)
        return {tag: share.exp() for tag, share in zip(branches, shares, strict=True)}
    return {tag: gate.sigmoid() for tag, gate in zip(branches, each.unbind(-1), strict=True)}
