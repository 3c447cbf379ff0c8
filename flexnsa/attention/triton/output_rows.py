"""Launches of the kernels of :mod:`flexnsa.attention.triton.kernels.output_rows`.

``stats`` are two numbers of a row that backward reads, -lse / scale and dlse - sum(do * out), float32
``(B, Hkv, T, G, 2)``. In memory the selected branch has both numbers of all heads of a query side by side, because it
gathers queries, and the others have the queries of a head side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexnsa.attention.operators import with_rows
from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels import output_rows as kernels
from flexnsa.attention.triton.operators import strides_of_groups

ROWS = 32
"""Rows of a program."""


def row_stats(
    grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, scale: float, kv_heads: int, *, gathered: bool
) -> Tensor:
    """Return the stats of a branch; ``gathered`` are those of the selected one."""
    grad_out, out, lse = with_rows(grad_out), with_rows(out), lse.contiguous()
    stats = _empty_stats(out, kv_heads, gathered=gathered)
    grid, sizes, shape = _launch(out, kv_heads)
    kernels.row_stats[grid](
        grad_out, out, lse, lse if grad_lse is None else grad_lse.contiguous(), stats,
        *strides_of_groups(grad_out, kv_heads), *strides_of_groups(out, kv_heads), *_strides(stats), *sizes, scale,
        **shape, HAS_GRAD_LSE=grad_lse is not None,
    )  # fmt: skip
    return stats


def gated_stats(
    grad_out: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, scale: float, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient of ``gates (branches, B, Hq, T)``, and the stats of branches for ``grad_out`` of their sum.

    The branches are the compressed and the selected one, and the window if there are three; else its stats are empty.
    """
    grad_out, outs, gates = with_rows(grad_out), [with_rows(out) for out in outs], gates.contiguous()
    stats = empty_gated_stats(outs[0], kv_heads, len(outs))
    grad_gates = gates.new_empty(gates.shape)
    grid, sizes, shape = _launch(outs[0], kv_heads)
    # The kernel does not read those of a third branch that is not there.
    three, lses = ([*x, *x][:3] for x in (outs, [lse.contiguous() for lse in lses]))
    kernels.gated_stats[grid](
        grad_out, *three, *lses, gates, grad_gates, *stats,
        *strides_of_groups(grad_out, kv_heads), *(x for out in three for x in strides_of_groups(out, kv_heads)),
        *_strides(stats[0]), *_strides(stats[1]), *sizes, gates[0].numel(), scale, **shape, BRANCHES=len(outs),
    )  # fmt: skip
    return grad_gates, *stats


def empty_gated_stats(out: Tensor, kv_heads: int, branches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the stats of the compressed and the selected branch, and of the window if there are three branches."""
    cmp, slc = (_empty_stats(out, kv_heads, gathered=gathered) for gathered in (False, True))
    return cmp, slc, torch.empty_like(cmp) if branches == 3 else cmp.new_empty(0)


def _empty_stats(out: Tensor, kv_heads: int, *, gathered: bool) -> Tensor:
    batch, heads, length, _ = out.shape
    group = heads // kv_heads
    if gathered:
        return out.new_empty(batch, kv_heads, length, group, 2, dtype=torch.float32)
    return out.new_empty(2, batch, kv_heads, group, length, dtype=torch.float32).permute(1, 2, 4, 3, 0)


def _strides(stats: Tensor) -> tuple[int, ...]:
    """Return the strides of the batch, the key head, the head in its group, the query, and the second number."""
    b, h, t, g, number = stats.stride()
    return b, h, g, t, number


def _launch(out: Tensor, kv_heads: int) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    batch, heads, length, dim = out.shape
    group = heads // kv_heads
    shape = {"G": group, "DV": dim, "BR": ROWS, "BDV": padded(dim), "num_warps": 4}
    return (cdiv(length * group, ROWS), batch * kv_heads), (kv_heads, length), shape
