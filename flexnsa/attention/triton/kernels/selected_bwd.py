# pyright: standard, reportGeneralTypeIssues=false
"""Selected attention, backward: forward once more, on the same lists, with transposed tiles.

``S^T = K Q^T`` and ``dP^T = V dO^T``, so that the products for dk and dv read them from registers. A replica stores dq
for each of its pairs, and a second kernel sums it over the ``n`` slots. It adds dk and dv to float32 sums directly if
its key tile has no other replica; otherwise it stores them, and a third kernel adds the replicas in a fixed order.
Chunks run one after the other. So every sum has a fixed order, and no addition is atomic.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flexnsa.attention.plan import HOPPER_ROWS as ROWS
from flexnsa.attention.plan import Plan, can_copy, gathers_keys, needs_int64
from flexnsa.attention.scoring import LOG2_E
from flexnsa.attention.tiles.device import Tiles, cdiv, padded
from flexnsa.attention.tiles.intervals import hopper_tiles
from flexnsa.attention.tiles.selected import SLOTS, SUM_ROWS, columns, max_replicas, max_shared, of_group
from flexnsa.attention.triton.arguments import Factors, strides_of_groups
from flexnsa.attention.triton.kernels.intervals import add_parts
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.selected_lists import Lists, Selection
from flexnsa.attention.triton.kernels.selected_pairs import (
    OF_CHUNK,
    OF_REPLICAS,
    count_masked,
    first_key,
    has_parity,
    keys_of_pair,
    load_row,
    locate,
    row_of_tile,
    sees,
)
from flexnsa.attention.triton.kernels.visible import capped, load_positions, through_cap

SHARED_ROWS = 8
"""Keys of a program that sums replicas: many programs, because each waits for memory."""


class OtherGradients(NamedTuple):
    """The gradients of q from the other branches, ``(B, Hq, T, Dk)``; None without a window."""

    cmp: Tensor
    win: Tensor | None = None


class WindowQueries(NamedTuple):
    """The gradient of q from the compressed branch, and keys, values and stats of the window.

    The window's gradient of q is computed in the kernel that adds all of them up.
    """

    cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    stats: Tensor


def backward_bytes(q: Tensor, k: Tensor, v: Tensor, n: int, chunk: int, capacity: int, block_size: int) -> int:
    """Return the bytes that one kv head needs: partial dq of a chunk, shared replicas, and sums of dk and dv."""
    pairs = min(chunk, q.shape[2]) * n
    dk, dv, group = k.shape[-1], v.shape[-1], q.shape[1] // k.shape[1]
    keys = k.shape[2] + max_shared(pairs, capacity) * block_size
    return (0 if gathers_keys(n) else pairs * group * dk * q.element_size()) + keys * (dk + dv) * 4


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    lists: Lists,
    stats: Tensor,
    grad_out: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *,
    factors: Factors,
    precision: str,
    tiles: Tiles,
    others: OtherGradients | WindowQueries | None,
    window: int,
) -> None:
    """Compute the gradients of q, k and v; to that of q, add those from the ``others``.

    Where the keys of queries are gathered, that of q is left to another kernel.
    """
    (batch, q_heads, num_queries, d_k), (kv_heads, num_keys), d_v = q.shape, k.shape[1:3], v.shape[-1]
    group, n, size = q_heads // kv_heads, selection.block_indices.shape[-1], selection.block_size
    chunk = min(lists.chunk, num_queries)
    new = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    heads = batch * kv_heads
    rows = heads * num_keys
    dk, dv = torch.split(new(rows * (d_k + d_v)).zero_(), [rows * d_k, rows * d_v])
    num_shared = max_shared(chunk * n, lists.capacity)
    dk_shared, dv_shared = (new(heads, num_shared, size, d) for d in (d_k, d_v))
    of_queries = not gathers_keys(n)
    part = q.new_empty(heads * chunk * n * group * d_k if of_queries else 0)

    num_replicas = max_replicas(selection.num_key_tiles, chunk * n, lists.capacity)
    low, high = columns(d_k, halve=True)
    has_positions = selection.token is not None
    shape: dict[str, object] = {"n": n, "G": group, "DK": d_k, "SIZE": size, "HAS_POSITIONS": has_positions}
    parities = (0, 1) if has_positions else (0,)
    int64_offsets = needs_int64(q, group, chunk) or needs_int64(grad_out, group, chunk)
    plan = Plan.of(q, k, v, block_size=size)
    (scale, inner), outer = factors, factors[0] * (factors[1] or 1.0)
    in_gluon = of_queries and plan.selected_in_gluon and not int64_offsets and can_copy(q, k, v, grad_out)
    queries = (selection.block_indices, *selection.positions())
    for index in range(lists.sizes[0]):
        sizes = (kv_heads, num_queries, num_keys, lists.chunk, index)
        tables = (*lists.sizes, num_shared)
        sums = (dk, dv, dk_shared, dv_shared)
        of_keys = *k.stride()[:3], *v.stride()[:3]
        row_strides = *strides_of_groups(q, kv_heads), *of_keys, *strides_of_groups(grad_out, kv_heads)
        tensors = (lists.order, lists.replicas, part, *sums, *row_strides, *sizes, *tables)
        for parity in parities:
            launched = q, k, v, grad_out, stats, *queries, *tensors, parity, outer, scale * LOG2_E
            if in_gluon:
                from flexnsa.attention.triton.kernels.hopper.selected_bwd import hopper_backward_parts

                hopper_backward_parts[(num_replicas, heads)](
                    *launched, **shape, DV=d_v, BM=ROWS, BN=ROWS, INNER=inner, DQ=64, num_warps=4
                )
            else:
                backward_parts[(num_replicas, heads)](
                    *launched,
                    **shape, DV=d_v, LOW=low, HIGH=high, BDV=padded(d_v), BN=padded(size), PRECISION=precision,
                    INNER=inner, OF_QUERIES=of_queries, INT64_OFFSETS=int64_offsets, **of_group(tiles, group),
                    **tiles.options(),
                )  # fmt: skip
        for parity in parities:
            sum_shared[(num_replicas * (padded(size) // SHARED_ROWS), heads)](
                *queries, lists.order, lists.replicas, *sums, *sizes, *tables, parity,
                n=n, DK=d_k, DV=d_v, SIZE=size, HAS_POSITIONS=has_positions, BN=padded(size),
                BDK=padded(d_k), BDV=padded(d_v), ROWS=SHARED_ROWS, num_warps=4,
            )  # fmt: skip
        if not of_queries:
            continue
        if isinstance(others, WindowQueries):
            from flexnsa.attention.triton.kernels.hopper.window_sums import hopper_sum_slots

            in_chunk = min(chunk, num_queries - index * lists.chunk)
            row_tiles, _ = hopper_tiles(d_k, d_v, windowed=True)
            _, *of_window = others
            strides = q, others.k_win, others.v_win
            hopper_sum_slots[(cdiv(in_chunk, row_tiles.queries) * group, heads)](
                part, *queries, q, *of_window, grad_out, others.cmp, grad_q,
                *itertools.chain(*(x.stride()[:3] for x in strides)), others.stats.stride(-1), *grad_out.stride()[:3],
                *grad_q.stride()[:3], *sizes, scale,
                **shape, DV=d_v, WINDOW=window, SLOTS=SLOTS,
                BM=row_tiles.queries, BN=row_tiles.keys, INNER=inner, **row_tiles.options("BUFFERS"),
            )  # fmt: skip
        else:
            cmp, win = others or (grad_q, None)
            added = cmp, grad_q if win is None else win
            sum_slots[(cdiv(chunk * group, SUM_ROWS), heads)](
                part, *queries, *added, grad_q, *strides_of_groups(grad_q, kv_heads), *sizes, **shape,
                BDK=padded(d_k), BR=SUM_ROWS, ALONE=others is None, HAS_WINDOW=win is not None, num_warps=4,
            )  # fmt: skip
    add_parts((dk.view(k.shape), dv.view(v.shape)), grad_k, grad_v, scale=outer)


@jit(do_not_specialize=[*OF_CHUNK, *OF_REPLICAS])
def backward_parts(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr,
    dq_ptr, dk_ptr, dv_ptr, dk_shared_ptr, dv_shared_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, d_sb, d_sh, d_sg, d_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, num_shared, parity, scale, qk_scale,
    n: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, QUERIES: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
    INNER: tl.constexpr, OF_QUERIES: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one replica, and ``OF_QUERIES`` the contribution of its keys to dq of its pairs."""
    bh = tl.program_id(1).to(tl.int64)
    replicas_ptr += (bh * num_chunks + index) * 5 * num_replicas + tl.program_id(0)
    count = tl.load(replicas_ptr + num_replicas)
    if (count > 0) & has_parity(tl.load(replicas_ptr), parity, HAS_POSITIONS):
        b = bh // kv_heads
        h = bh % kv_heads
        t0 = chunk * index
        q_ptr += b * q_sb + h * q_sh + t0.to(tl.int64) * q_st
        do_ptr += b * d_sb + h * d_sh + t0.to(tl.int64) * d_st
        k_ptr += b * k_sb + h * k_sh
        v_ptr += b * v_sb + h * v_sh
        stats_ptr += (bh * num_queries + t0) * G * 2
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        dq_ptr += bh * tl.minimum(chunk, num_queries) * n * G * DK

        where = None
        if HAS_POSITIONS:
            where = idx_ptr + (bh * num_queries + t0) * n, token_ptr + b * p_sb, start_ptr + b * p_sb, t0
        first = first_key(tl.load(replicas_ptr), tl.load(order_ptr), where, n, SIZE)
        masked = count_masked(first, order_ptr, where, t0, n, SIZE)
        masked = tl.where((BN > SIZE) | (first < 0) | (first + BN > num_keys), 2147483647, masked)
        key = first + tl.arange(0, BN)
        valid_key = (key < first + SIZE) & (key >= 0) & (key < num_keys)
        # Columns of keys and queries are in two parts, so that the tile of dq, which needs registers in addition to
        # those of dk and dv, is narrower.
        low = tl.arange(0, LOW)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        k_row = k_ptr + key.to(tl.int64)[:, None] * k_st
        v_row = v_ptr + key.to(tl.int64)[:, None] * v_st
        k_low = tl.load(k_row + low, mask=valid_key[:, None] & (low < DK), other=0.0)
        dk_low = tl.zeros([BN, LOW], tl.float32)
        if HIGH > 0:
            high = LOW + tl.arange(0, HIGH)[None, :]
            k_high = tl.load(k_row + high, mask=valid_key[:, None] & (high < DK), other=0.0)
            dk_high = tl.zeros([BN, HIGH], tl.float32)
        v = tl.load(v_row + v_col, mask=valid_key[:, None] & (v_col < DV), other=0.0)
        dv = tl.zeros([BN, BDV], tl.float32)
        key = tl.where(valid_key, key, 2147483647)

        r = tl.arange(0, BM)
        ahead = tl.load(order_ptr + tl.minimum(row_of_tile(0, r, QUERIES, SPREAD, G)[0], count - 1))
        for i in range(tl.cdiv(count, QUERIES) * SPREAD):
            at, head, valid = row_of_tile(i, r, QUERIES, SPREAD, G)
            valid = valid & (at < count)
            pair = ahead
            ahead = tl.load(order_ptr + tl.minimum(row_of_tile(i + 1, r, QUERIES, SPREAD, G)[0], count - 1))
            t = pair // n
            if INT64_OFFSETS:
                q_row = (q_ptr + (t.to(tl.int64) * q_st + head.to(tl.int64) * q_sg))[:, None]
                do_row = (do_ptr + (t.to(tl.int64) * d_st + head.to(tl.int64) * d_sg))[:, None]
            else:
                q_row = (q_ptr + (t * q_st + head * q_sg))[:, None]
                do_row = (do_ptr + (t * d_st + head * d_sg))[:, None]
            q_low = load_row(q_row, low, DK, LOW)
            if HIGH > 0:
                q_high = load_row(q_row, high, DK, LOW + HIGH)
            do = load_row(do_row, v_col, DV, BDV)
            # One load of two numbers per row: Triton repeats a load of fewer elements than threads, addresses included,
            # for the layout of each use. Padding rows get values that make their probabilities 0.
            stat = stats_ptr + ((t * G + head) * 2)[:, None] + tl.arange(0, 2)[None, :]
            lse, delta = tl.split(tl.load(stat, mask=valid[:, None], other=-1e30))
            s = tl.dot(k_low, tl.trans(q_low), tl.broadcast_to(lse[None, :], [BN, BM]), input_precision=PRECISION)
            if HIGH > 0:
                s = tl.dot(k_high, tl.trans(q_high), s, input_precision=PRECISION)
            s = capped(s - lse[None, :] if INNER != 0.0 else s, INNER, q_low.dtype)
            p = tl.exp2((s + lse[None, :] if INNER != 0.0 else s) * qk_scale)
            if i // SPREAD * QUERIES < masked:
                pair_again = tl.load(order_ptr + tl.minimum(at, count - 1))
                seen = sees(pair_again, key, where, t0, n, SIZE)
                p = tl.where(tl.trans(seen), p, 0.0)
            dp = tl.dot(v, tl.trans(do), tl.broadcast_to(delta[None, :], [BN, BM]), input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = through_cap(p * dp, s, INNER).to(q_low.dtype)
            dk_low = tl.dot(ds, q_low, dk_low, input_precision=PRECISION)
            if HIGH > 0:
                dk_high = tl.dot(ds, q_high, dk_high, input_precision=PRECISION)
            if OF_QUERIES:
                dq_row = dq_ptr + (pair.to(tl.int64) * G + head)[:, None] * DK
                dq = tl.dot(tl.trans(ds), k_low, input_precision=PRECISION) * scale
                dq = dq.to(dq_ptr.dtype.element_ty)
                tl.store(dq_row + low, dq, mask=valid[:, None] & (low < DK))
                if HIGH > 0:
                    dq = tl.dot(tl.trans(ds), k_high, input_precision=PRECISION) * scale
                    dq = dq.to(dq_ptr.dtype.element_ty)
                    tl.store(dq_row + high, dq, mask=valid[:, None] & (high < DK))

        # An only replica adds to the gradients of earlier chunks; several replicas store theirs for sum_shared.
        slot = tl.load(replicas_ptr + 3 * num_replicas)
        col = tl.arange(0, BN)
        to = (bh * num_keys + first + col)[:, None]
        if slot >= 0:
            to = ((bh * num_shared + slot) * SIZE + col)[:, None]
            dk_ptr = dk_shared_ptr
            dv_ptr = dv_shared_ptr
        elif HAS_POSITIONS:
            _, token = keys_of_pair(tl.load(order_ptr + count - 1), where, n, SIZE)
            valid_key = valid_key & (key <= token)
        valid_key = valid_key[:, None]
        _store(dk_ptr + to * DK + low, dk_low, valid_key & (low < DK), slot)
        if HIGH > 0:
            _store(dk_ptr + to * DK + high, dk_high, valid_key & (high < DK), slot)
        _store(dv_ptr + to * DV + v_col, dv, valid_key & (v_col < DV), slot)


@jit
def _store(ptr, x, mask, slot):
    tl.store(ptr, x + tl.load(ptr, mask=mask & (slot < 0), other=0.0), mask=mask)


@jit(do_not_specialize=[*OF_CHUNK, *OF_REPLICAS])
def sum_shared(
    idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr, dk_ptr, dv_ptr, dk_shared_ptr, dv_shared_ptr,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, num_shared, parity,
    n: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of key tiles with several replicas, in a fixed order; a program has ``ROWS`` keys."""
    bh = tl.program_id(1).to(tl.int64)
    replicas_ptr += (bh * num_chunks + index) * 5 * num_replicas + tl.program_id(0) // (BN // ROWS)
    replicas = tl.load(replicas_ptr + 4 * num_replicas)
    if (replicas > 0) & has_parity(tl.load(replicas_ptr), parity, HAS_POSITIONS):
        t0 = chunk * index
        at = (bh // kv_heads) * p_sb
        where = (idx_ptr + (bh * num_queries + t0) * n, token_ptr + at, start_ptr + at, t0) if HAS_POSITIONS else None
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        first = first_key(tl.load(replicas_ptr), tl.load(order_ptr), where, n, SIZE)
        slot = tl.load(replicas_ptr + 3 * num_replicas)
        row = tl.program_id(0) % (BN // ROWS) * ROWS + tl.arange(0, ROWS)
        key = first + row
        valid = (row < SIZE) & (key >= 0) & (key < num_keys)
        if HAS_POSITIONS:
            final = replicas_ptr + replicas - 1
            end = tl.load(final + 2 * num_replicas) + tl.load(final + num_replicas)
            last = tl.load(order_ptr + end - tl.load(replicas_ptr + 2 * num_replicas) - 1) // n
            valid = valid & (key <= tl.load(token_ptr + at + t0 + last))
        valid = valid[:, None]
        k_col = tl.arange(0, BDK)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        to = (bh * num_keys + key)[:, None]
        dk = tl.load(dk_ptr + to * DK + k_col, mask=valid & (k_col < DK), other=0.0)
        dv = tl.load(dv_ptr + to * DV + v_col, mask=valid & (v_col < DV), other=0.0)
        for i in range(replicas):
            part = ((bh * num_shared + slot + i) * SIZE + row)[:, None]
            dk += tl.load(dk_shared_ptr + part * DK + k_col, mask=valid & (k_col < DK), other=0.0)
            dv += tl.load(dv_shared_ptr + part * DV + v_col, mask=valid & (v_col < DV), other=0.0)
        tl.store(dk_ptr + to * DK + k_col, dk, mask=valid & (k_col < DK))
        tl.store(dv_ptr + to * DV + v_col, dv, mask=valid & (v_col < DV))


@jit(do_not_specialize=OF_CHUNK)
def sum_slots(
    part_ptr, idx_ptr, token_ptr, start_ptr, p_sb, cmp_ptr, win_ptr, dq_ptr, d_sb, d_sh, d_sg, d_st,
    kv_heads, num_queries, num_keys, chunk, index,
    n: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BDK: tl.constexpr, BR: tl.constexpr, ALONE: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Sum dq over the slots, and unless ``ALONE`` over the other branches; a program has ``BR`` (query, head) rows."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // kv_heads
    h = bh % kv_heads
    t0 = chunk * index
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    query = row // G
    t = t0 + query
    g = row % G
    inside = (query < chunk) & (t < num_queries)
    token, start = load_positions(token_ptr + b * p_sb, start_ptr + b * p_sb, t, num_queries, HAS_POSITIONS)
    col = tl.arange(0, BDK)[None, :]
    part_ptr += bh * tl.minimum(chunk, num_queries) * n * G * DK
    idx_ptr += (bh * num_queries + t0) * n
    part = query.to(tl.int64) * (n * G) + g
    acc = tl.zeros([BR, BDK], tl.float32)
    for slot in tl.static_range(n):
        block = tl.load(idx_ptr + query * n + slot, mask=inside, other=-1)
        _, _, listed = locate(block, token, start, num_keys, SIZE, HAS_POSITIONS)
        part_row = (part + slot * G)[:, None] * DK + col
        acc += tl.load(part_ptr + part_row, mask=(inside & listed)[:, None] & (col < DK), other=0.0).to(tl.float32)
    at = (b * d_sb + h * d_sh + g.to(tl.int64) * d_sg + t.to(tl.int64) * d_st)[:, None] + col
    mask = inside[:, None] & (col < DK)
    if not ALONE:
        acc += tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_WINDOW:
            acc += tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dq_ptr + at, acc.to(dq_ptr.dtype.element_ty), mask=mask)
