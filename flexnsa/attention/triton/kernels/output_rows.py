# pyright: standard, reportGeneralTypeIssues=false
"""Launches of the kernels of :mod:`flexnsa.attention.triton.kernels.output_rows`.

``stats`` are two numbers of a row that backward reads, -lse / scale and dlse - sum(do * out), float32
``(B, Hkv, T, G, 2)``. In memory the selected branch has both numbers of all heads of a query side by side, because it
gathers queries, and the others have the queries of a head side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.arguments import strides_of_groups
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.operators.results import with_rows

Gates = tuple[Tensor, Tensor | None, Tensor | None]
"""The gates ``(B, Hq, T)`` of the compressed branch, of the window and of the selected branch."""
ROWS = 32
"""Rows of a program."""


def stats_of_rows(
    grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, scale: float, kv_heads: int, *, gathered: bool
) -> Tensor:
    """Return the stats of a branch; ``gathered`` are those of the selected one."""
    grad_out, out, lse = with_rows(grad_out), with_rows(out), lse.contiguous()
    stats = _empty_stats(out, kv_heads, gathered=gathered)
    grid, sizes, shape = _launch(out, kv_heads)
    row_stats[grid](
        grad_out, out, lse, lse if grad_lse is None else grad_lse.contiguous(), stats,
        *strides_of_groups(grad_out, kv_heads), *strides_of_groups(out, kv_heads), *stats.stride(), *sizes, scale,
        **shape, HAS_GRAD_LSE=grad_lse is not None,
    )  # fmt: skip
    return stats


def stats_of_gated(
    grad_out: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], gates: Gates, scale: float, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of gates, and the stats of branches for ``grad_out`` of their sum.

    The outputs are those of the compressed and of the selected branch, and of the window, if it has a gate; where the
    selected branch has none, the gated sum is in place of its output.
    """
    branches, gates = 2 if gates[1] is None else 3, same_strides(*gates)
    grad_out, outs = with_rows(grad_out), [with_rows(out) for out in outs[:branches]]
    results = empty_gated_stats(outs[0], kv_heads, gates)
    grid, sizes, shape = _launch(outs[0], kv_heads)
    # The kernel does not read those of a third branch that is not there.
    three, lses = ([*x, *x][:3] for x in (outs, [lse.contiguous() for lse in lses[:branches]]))
    gated_stats[grid](
        grad_out, *three, *lses, *(gates[0] if gate is None else gate for gate in gates), *results,
        *(x for out in (grad_out, *three, gates[0]) for x in strides_of_groups(out, kv_heads)),
        *results[1].stride(), *results[2].stride(), *sizes, gates[0].numel(), scale,
        **shape, BRANCHES=branches, FROM_SUM=gates[2] is None,
    )  # fmt: skip
    return results


def empty_gated_stats(out: Tensor, kv_heads: int, gates: Gates) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the gradients of the gates that there are, and stats; those of no window are empty."""
    cmp, slc = (_empty_stats(out, kv_heads, gathered=gathered) for gathered in (False, True))
    of_gates = gates[0].new_empty(sum(gate is not None for gate in gates), *gates[0].shape)
    return of_gates, cmp, slc, cmp.new_empty(0) if gates[1] is None else torch.empty_like(cmp)


def same_strides(cmp: Tensor, *others: Tensor | None) -> Gates:
    """Return gates, all with the strides of the first."""
    layout = cmp.shape, cmp.stride()
    win, slc = (x if x is None or x.stride() == layout[1] else x.new_empty_strided(*layout).copy_(x) for x in others)
    return cmp, win, slc


def _empty_stats(out: Tensor, kv_heads: int, *, gathered: bool) -> Tensor:
    batch, heads, length, _ = out.shape
    group = heads // kv_heads
    if gathered:
        return out.new_empty(batch, kv_heads, length, group, 2, dtype=torch.float32)
    return out.new_empty(2, batch, kv_heads, group, length, dtype=torch.float32).permute(1, 2, 4, 3, 0)


def _launch(out: Tensor, kv_heads: int) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    batch, heads, length, dim = out.shape
    group = heads // kv_heads
    shape = {"G": group, "DV": dim, "BR": ROWS, "BDV": padded(dim), "num_warps": 4}
    return (cdiv(length * group, ROWS), batch * kv_heads), (kv_heads, length), shape


@jit(do_not_specialize=["kv_heads", "num_queries"])
def row_stats(
    do_ptr, out_ptr, lse_ptr, dlse_ptr, stats_ptr, d_sb, d_sh, d_sg, d_st, o_sb, o_sh, o_sg, o_st,
    s_sb, s_sh, s_st, s_sg, s_sn, kv_heads, num_queries, scale,
    G: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, BDV: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """Store (-lse / scale, dlse - sum(do * out)): what backward adds to products of q and k, and of do and v."""
    bh, b, h, t, g, inside = rows_of_group(kv_heads, num_queries, G, BR)
    do = load_rows(do_ptr + b * d_sb + h * d_sh, t * d_st + g * d_sg, inside, DV, BDV)
    out = load_rows(out_ptr + b * o_sb + h * o_sh, t * o_st + g * o_sg, inside, DV, BDV)
    delta = -tl.sum(do * out, 1)
    at = (bh * G + g) * num_queries + t
    if HAS_GRAD_LSE:
        delta += tl.load(dlse_ptr + at, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    stats_ptr += b * s_sb + h * s_sh + t * s_st + g * s_sg
    tl.store(stats_ptr, shift_of(lse, scale), mask=inside)
    tl.store(stats_ptr + s_sn, delta, mask=inside)


@jit(do_not_specialize=["g_sb", "g_sh", "g_sg", "kv_heads", "num_queries", "gates_of_branch"])
def gated_stats(
    do_ptr, cmp_ptr, slc_ptr, win_ptr, cmp_lse_ptr, slc_lse_ptr, win_lse_ptr, cmp_gate_ptr, win_gate_ptr, slc_gate_ptr,
    dgate_ptr, cmp_stats_ptr, slc_stats_ptr, win_stats_ptr, d_sb, d_sh, d_sg, d_st, c_sb, c_sh, c_sg, c_st,
    s_sb, s_sh, s_sg, s_st, w_sb, w_sh, w_sg, w_st, g_sb, g_sh, g_sg, g_st,
    i_sb, i_sh, i_st, i_sg, i_sn, r_sb, r_sh, r_st, r_sg, r_sn,
    kv_heads, num_queries, gates_of_branch, scale,
    G: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr, BDV: tl.constexpr, BRANCHES: tl.constexpr,
    FROM_SUM: tl.constexpr,
):  # fmt: skip
    """Store :func:`row_stats` of each branch, and the gradients of the gates.

    A branch has the gradient ``gate * do`` of its output. Its probabilities take the gate instead: ``log(gate)`` is
    subtracted from its lse. So all branches read ``do`` itself, and ``sum(do * out)`` is the gradient of the gate too.
    """
    bh, b, h, t, g, inside = rows_of_group(kv_heads, num_queries, G, BR)
    do = load_rows(do_ptr + b * d_sb + h * d_sh, t * d_st + g * d_sg, inside, DV, BDV)
    at = (bh * G + g) * num_queries + t
    to_interval = b * i_sb + h * i_sh + t * i_st + g * i_sg
    at_gate = b * g_sb + h * g_sh + t * g_st + g * g_sg
    of_others = tl.zeros([BR], tl.float32)
    for i in tl.static_range(BRANCHES):
        if i == 0:
            out = load_rows(cmp_ptr + b * c_sb + h * c_sh, t * c_st + g * c_sg, inside, DV, BDV)
            lse_ptr, gate_ptr, to = cmp_lse_ptr, cmp_gate_ptr, cmp_stats_ptr + to_interval
        elif i == BRANCHES - 1:  # the selected branch, last
            out = load_rows(slc_ptr + b * s_sb + h * s_sh, t * s_st + g * s_sg, inside, DV, BDV)
            lse_ptr, gate_ptr, to = slc_lse_ptr, slc_gate_ptr, slc_stats_ptr + b * r_sb + h * r_sh + t * r_st + g * r_sg
        else:
            out = load_rows(win_ptr + b * w_sb + h * w_sh, t * w_st + g * w_sg, inside, DV, BDV)
            lse_ptr, gate_ptr, to = win_lse_ptr, win_gate_ptr, win_stats_ptr + to_interval
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
        delta = tl.sum(do * out, 1)
        if FROM_SUM and i == BRANCHES - 1:
            delta -= of_others
            gate = tl.full([BR], 1.0, tl.float32)
        else:
            gate = tl.load(gate_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)
            of_others += gate * delta
            tl.store(dgate_ptr + i * gates_of_branch + at, delta.to(dgate_ptr.dtype.element_ty), mask=inside)
        tl.store(to, tl.where(gate == 0.0, -1e30, shift_of(lse, scale) + tl.log(gate) / scale), mask=inside)
        tl.store(to + (r_sn if i == BRANCHES - 1 else i_sn), -delta, mask=inside)


@jit
def rows_of_group(kv_heads, num_queries, G: tl.constexpr, BR: tl.constexpr):
    """Return the group of a program, batch element and key head; for each row query, head, and whether it exists."""
    bh = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    t = (row // G).to(tl.int64)
    return bh, bh // kv_heads, bh % kv_heads, t, (row % G).to(tl.int64), t < num_queries


@jit
def shift_of(lse, scale):
    """Return -lse / scale, or without a key, where lse is -inf, what makes all probabilities 0."""
    return tl.where(lse == float("-inf"), -1e30, -lse / scale)


@jit
def load_rows(ptr, offset, inside, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of ``D`` columns as float32, padded with 0 to ``BD``."""
    col = tl.arange(0, BD)[None, :]
    return tl.load(ptr + offset[:, None] + col, mask=inside[:, None] & (col < D), other=0.0).to(tl.float32)
