# pyright: standard, reportGeneralTypeIssues=false
"""Selected attention, forward: a program per key tile, which loops over the queries that selected it.

A program has one replica of a key tile (:mod:`flexnsa.attention.triton.kernels.selected_lists`). Its keys and values
stay on chip, and the rows of its queries, all heads of the group, stream past them. For each pair it stores a *partial
output*, that of the query over these keys only, with its log-sum-exp. A second kernel joins the ``n`` partial outputs
of each query. Memory traffic does not depend on the size of the group, and every product has enough rows for tensor
cores.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.interface import given
from flexnsa.attention.plan import HOPPER_ROWS as ROWS
from flexnsa.attention.plan import Plan, can_copy, needs_int64
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, padded
from flexnsa.attention.tiles.selected import SLOTS, SUM_ROWS, columns, max_replicas, of_group
from flexnsa.attention.triton.arguments import Factors, strides_of_groups
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.selected_lists import Lists, Selection
from flexnsa.attention.triton.kernels.selected_pairs import count_masked, first_key, load_row, locate, row_of_tile, sees
from flexnsa.attention.triton.kernels.visible import capped, load_positions

PIECE, PIECE_ROWS = 64, 768
"""Queries of a program on Hopper. A small group has more queries: at least so many (query, head) rows.

A replica may have several programs, because they add nothing up. Instead of one for 512 queries that takes 9 to 20 %
less time at 8k, and 8 % at 64k (H100)."""
HOPPER_REGISTERS = {64: 128, 128: 168}
"""Limit of registers of a thread, by head dimension. With it four and three programs fit a multiprocessor, without it
three and two."""


class GatedBranches(NamedTuple):
    """The gated sum of the branches, and what is added to the selected one.

    Args:
        total: the sum ``(B, Hq, T, Dv)``, to be filled.
        cmp: output of the compressed branch, in memory as that of the selected branch.
        cmp_gate: of the compressed branch, ``(B, Hq, T)``.
        win_gate: of the window, with the same strides; None without one.
        slc_gate: of the selected branch, likewise; None for 1, and its output is not stored then.
        win: likewise of the window, to be filled if it is computed together with the sum; None without one.
        win_lse: likewise, ``(B, Hq, T)``.
        k_win: keys of the window ``(B, Hkv, S, Dk)``.
        v_win: its values ``(B, Hkv, S, Dv)``.
    """

    total: Tensor
    cmp: Tensor
    cmp_gate: Tensor
    win_gate: Tensor | None = None
    slc_gate: Tensor | None = None
    win: Tensor | None = None
    win_lse: Tensor | None = None
    k_win: Tensor | None = None
    v_win: Tensor | None = None


def forward_bytes(q: Tensor, k: Tensor, v: Tensor, n: int, chunk: int) -> int:
    """Return the bytes of partial outputs of one kv head for a chunk."""
    group = q.shape[1] // k.shape[1]
    return min(chunk, q.shape[2]) * n * group * (v.shape[-1] * q.element_size() + 4)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    lists: Lists,
    out: Tensor,
    lse: Tensor,
    gated: GatedBranches | None,
    *,
    factors: Factors,
    precision: str,
    tiles: Tiles,
    window: int | None,
) -> None:
    """Compute ``out (B, Hq, T, Dv)`` and the natural ``lse`` (float32, ``(B, Hq, T)``), chunk by chunk of queries.

    A ``window`` of so many keys is attended to in the kernel that adds up the branches.
    """
    (batch, q_heads, num_queries, dk), (kv_heads, num_keys), dv = q.shape, k.shape[1:3], v.shape[-1]
    (scale, inner), group, n = factors, q_heads // kv_heads, selection.block_indices.shape[-1]
    chunk = min(lists.chunk, num_queries)
    part_out = torch.empty(batch * kv_heads, chunk, n, group, dv, dtype=q.dtype, device=q.device)
    part_lse = torch.empty(batch * kv_heads, chunk, n, group, dtype=torch.float32, device=q.device)
    num_replicas = max_replicas(selection.num_key_tiles, chunk * n, lists.capacity)
    low, high = columns(dk, halve=False)
    shape: dict[str, object] = {"n": n, "G": group, "DV": dv, "SIZE": selection.block_size}
    shape |= {"HAS_POSITIONS": selection.token is not None}
    int64_offsets = needs_int64(q, group, chunk)
    plan = Plan.of(q, k, v, block_size=selection.block_size)
    in_gluon = plan.selected_in_gluon and not int64_offsets and can_copy(q, k, v)
    queries = (selection.block_indices, *selection.positions())
    total, cmp, *gates, win, win_lse, k_win, v_win = gated or GatedBranches(out, out, lse, slc_gate=lse)
    keeps, gates = gates[-1] is not None, [lse if gate is None else gate for gate in gates]
    sums = cmp, out if win is None else win, *gates, total, *strides_of_groups(total, kv_heads)
    for index in range(lists.sizes[0]):
        sizes = (kv_heads, num_queries, num_keys, lists.chunk, index)
        tensors = lists.order, lists.replicas, part_out, part_lse
        row_strides = *strides_of_groups(q, kv_heads), *k.stride()[:3], *v.stride()[:3]
        tables = *lists.sizes, scale * LOG2_E
        if in_gluon:
            from flexnsa.attention.triton.kernels.hopper.selected_fwd import hopper_forward_parts

            registers = HOPPER_REGISTERS[64 if max(dk, dv) <= 64 else 128]
            piece = max(PIECE, PIECE_ROWS // group)
            pieces = cdiv(lists.capacity, piece)
            hopper_forward_parts[(num_replicas * pieces, batch * kv_heads)](
                q, k, v, *queries, *tensors, *row_strides, *sizes, *tables,
                **shape, DK=dk, BM=ROWS, BN=ROWS, INNER=inner, PIECE=piece, PIECES=pieces,
                num_warps=4, maxnreg=registers,
            )  # fmt: skip
        else:
            forward_parts[(num_replicas, batch * kv_heads)](
                q, k, v, *queries, *tensors, *row_strides, *sizes, *tables,
                **shape, DK=dk, LOW=low, HIGH=high, BDV=padded(dv), BN=padded(selection.block_size), INNER=inner,
                PRECISION=precision, INT64_OFFSETS=int64_offsets, **of_group(tiles, group), **tiles.options(),
            )  # fmt: skip
        if window is None:
            combine[(cdiv(chunk * group, SUM_ROWS), batch * kv_heads)](
                part_out, part_lse, *queries, out, lse, *strides_of_groups(out, kv_heads), *sums,
                *strides_of_groups(gates[0], kv_heads), *sizes, **shape, BDV=padded(dv), BR=SUM_ROWS,
                ALONE=gated is None, HAS_WINDOW=win is not None, KEEP=keeps, num_warps=4,
            )  # fmt: skip
        else:
            from flexnsa.attention.triton.kernels.hopper.window_sums import hopper_combine

            strides = (x.stride()[:3] for x in (q, given(k_win), given(v_win), out, total, gates[0]))
            hopper_combine[(cdiv(min(chunk, num_queries - index * lists.chunk), ROWS) * group, batch * kv_heads)](
                part_out, part_lse, *queries, q, k_win, v_win, cmp, win, win_lse, out, lse, *gates, total,
                *itertools.chain(*strides), *sizes, scale * LOG2_E,
                **shape, DK=dk, WINDOW=window, SLOTS=SLOTS, BM=ROWS, BN=ROWS, INNER=inner, KEEP=keeps, num_warps=4,
                maxnreg=None if selection.token is None else 168,  # so that three programs fit, as without positions
            )  # fmt: skip


@jit(do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index", "num_chunks", "num_replicas"])
def forward_parts(
    q_ptr, k_ptr, v_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr, po_ptr, pl_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, qk_scale,
    n: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, QUERIES: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
    INNER: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Attend from the queries of one replica to its keys only: the normalised output and the base-2 log-sum-exp."""
    bh = tl.program_id(1).to(tl.int64)
    replicas_ptr += (bh * num_chunks + index) * 5 * num_replicas + tl.program_id(0)
    count = tl.load(replicas_ptr + num_replicas)
    if count > 0:
        b = bh // kv_heads
        h = bh % kv_heads
        t0 = chunk * index
        rows = tl.minimum(chunk, num_queries)
        q_ptr += b * q_sb + h * q_sh + t0.to(tl.int64) * q_st
        k_ptr += b * k_sb + h * k_sh
        v_ptr += b * v_sb + h * v_sh
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        po_ptr += bh * rows * n * G * DV
        pl_ptr += bh * rows * n * G

        where = None
        if HAS_POSITIONS:
            where = idx_ptr + (bh * num_queries + t0) * n, token_ptr + b * p_sb, start_ptr + b * p_sb, t0
        first = first_key(tl.load(replicas_ptr), tl.load(order_ptr), where, n, SIZE)
        masked = count_masked(first, order_ptr, where, t0, n, SIZE)
        masked = tl.where((BN > SIZE) | (first < 0) | (first + BN > num_keys), 2147483647, masked)
        key = first + tl.arange(0, BN)
        valid_key = (key < first + SIZE) & (key >= 0) & (key < num_keys)
        low = tl.arange(0, LOW)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        k_row = k_ptr + key.to(tl.int64)[:, None] * k_st
        v_row = v_ptr + key.to(tl.int64)[:, None] * v_st
        k_low = tl.trans(tl.load(k_row + low, mask=valid_key[:, None] & (low < DK), other=0.0))
        if HIGH > 0:
            high = LOW + tl.arange(0, HIGH)[None, :]
            k_high = tl.trans(tl.load(k_row + high, mask=valid_key[:, None] & (high < DK), other=0.0))
        v = tl.load(v_row + v_col, mask=valid_key[:, None] & (v_col < DV), other=0.0)
        key = tl.where(valid_key, key, 2147483647)

        r = tl.arange(0, BM)
        ahead = tl.load(order_ptr + tl.minimum(row_of_tile(0, r, QUERIES, SPREAD, G)[0], count - 1))
        for i in range(tl.cdiv(count, QUERIES) * SPREAD):
            at, head, valid = row_of_tile(i, r, QUERIES, SPREAD, G)
            valid = valid & (at < count)
            pair = ahead
            # The next tile's query indices are loaded one tile early, to hide the latency of loading their rows.
            ahead = tl.load(order_ptr + tl.minimum(row_of_tile(i + 1, r, QUERIES, SPREAD, G)[0], count - 1))
            t = pair // n
            if INT64_OFFSETS:
                q_row = (q_ptr + (t.to(tl.int64) * q_st + head.to(tl.int64) * q_sg))[:, None]
            else:
                q_row = (q_ptr + (t * q_st + head * q_sg))[:, None]
            s = tl.dot(load_row(q_row, low, DK, LOW), k_low, input_precision=PRECISION)
            if HIGH > 0:
                s = tl.dot(load_row(q_row, high, DK, LOW + HIGH), k_high, s, input_precision=PRECISION)
            s = capped(s, INNER, v.dtype)
            if i // SPREAD * QUERIES < masked:
                seen = sees(pair, key, where, t0, n, SIZE)
                s = tl.where(seen, s, float("-inf"))
            top = tl.max(s, 1) * qk_scale
            top = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s * qk_scale - top[:, None])
            total = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            some = tl.where(total == 0.0, 1.0, total)
            o *= (1.0 / some)[:, None]
            row = pair.to(tl.int64) * G + head
            tl.store(pl_ptr + row, tl.where(total == 0.0, float("-inf"), top + tl.log2(some)), mask=valid)
            to = po_ptr + row[:, None] * DV + v_col
            tl.store(to, o.to(po_ptr.dtype.element_ty), mask=valid[:, None] & (v_col < DV))


@jit(do_not_specialize=["p_sb", "g_sb", "g_sh", "g_sg", "kv_heads", "num_queries", "num_keys", "chunk", "index"])
def combine(
    po_ptr, pl_ptr, idx_ptr, token_ptr, start_ptr, p_sb, out_ptr, lse_ptr, o_sb, o_sh, o_sg, o_st,
    cmp_ptr, win_ptr, cmp_gate_ptr, win_gate_ptr, slc_gate_ptr, sum_ptr, s_sb, s_sh, s_sg, s_st, g_sb, g_sh, g_sg, g_st,
    kv_heads, num_queries, num_keys, chunk, index,
    n: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BDV: tl.constexpr, BR: tl.constexpr, ALONE: tl.constexpr, HAS_WINDOW: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Join partial outputs, weighted by ``exp(lse)`` of their pairs; a program has ``BR`` (query, head) rows.

    Unless ``ALONE`` it also stores the gated sum with the outputs of the compressed branch and, if there is one, of the
    window, which lie in memory as this one.
    """
    bh = tl.program_id(1).to(tl.int64)
    b = bh // kv_heads
    h = bh % kv_heads
    t0 = chunk * index
    rows = tl.minimum(chunk, num_queries)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    query = row // G
    t = t0 + query
    g = row % G
    inside = (query < chunk) & (t < num_queries)
    token, start = load_positions(token_ptr + b * p_sb, start_ptr + b * p_sb, t, num_queries, HAS_POSITIONS)
    col = tl.arange(0, BDV)[None, :]
    po_ptr += bh * rows * n * G * DV
    pl_ptr += bh * rows * n * G
    idx_ptr += (bh * num_queries + t0) * n
    part = query.to(tl.int64) * (n * G) + g

    top = tl.full([BR], float("-inf"), tl.float32)
    for slot in tl.static_range(n):
        block = tl.load(idx_ptr + query * n + slot, mask=inside, other=-1)
        _, _, listed = locate(block, token, start, num_keys, SIZE, HAS_POSITIONS)
        top = tl.maximum(top, tl.load(pl_ptr + part + slot * G, mask=inside & listed, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    for slot in tl.static_range(n):
        block = tl.load(idx_ptr + query * n + slot, mask=inside, other=-1)
        _, _, listed = locate(block, token, start, num_keys, SIZE, HAS_POSITIONS)
        listed = listed & inside
        share = tl.exp2(tl.load(pl_ptr + part + slot * G, mask=listed, other=float("-inf")) - top)
        part_row = (part + slot * G)[:, None] * DV + col
        o = tl.load(po_ptr + part_row, mask=listed[:, None] & (col < DV), other=0.0)
        acc += share[:, None] * o.to(tl.float32)
        total += share
    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * 0.6931471805599453)
    tl.store(lse_ptr + (bh * G + g) * num_queries + t, lse, mask=inside)
    g, t = g.to(tl.int64), t.to(tl.int64)
    at = (b * o_sb + h * o_sh + g * o_sg + t * o_st)[:, None] + col
    mask = inside[:, None] & (col < DV)
    out = (acc / some[:, None]).to(out_ptr.dtype.element_ty)
    if KEEP:
        tl.store(out_ptr + at, out, mask=mask)
    if not ALONE:
        at_gate = b * g_sb + h * g_sh + g * g_sg + t * g_st
        cmp_gate = tl.load(cmp_gate_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = cmp_gate * tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32)
        slc_gate = tl.load(slc_gate_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)[:, None] if KEEP else 1.0
        total += slc_gate * out.to(tl.float32)
        if HAS_WINDOW:
            win_gate = tl.load(win_gate_ptr + at_gate, mask=inside, other=0.0).to(tl.float32)[:, None]
            total += win_gate * tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32)
        sum_row = sum_ptr + b * s_sb + h * s_sh + g * s_sg + t * s_st
        tl.store(sum_row[:, None] + col, total.to(sum_ptr.dtype.element_ty), mask=mask)
