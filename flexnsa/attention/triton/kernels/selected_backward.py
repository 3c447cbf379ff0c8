# pyright: standard, reportGeneralTypeIssues=false
"""Selected attention, backward; see :mod:`flexnsa.attention.triton.selected_backward`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.selected_pairs import (
    first_key,
    has_parity,
    load_row,
    needs_mask,
    row_of_tile,
    sees,
)
from flexnsa.attention.triton.typed import jit


@jit(
    do_not_specialize=[
        "p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index", "num_chunks", "num_replicas", "num_shared",
        "parity",
    ]
)  # fmt: skip
def backward_parts(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr,
    dq_ptr, dk_ptr, dv_ptr, dk_shared_ptr, dv_shared_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, d_sb, d_sh, d_sg, d_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, num_shared, parity, scale, qk_scale,
    n: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, QUERIES: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one replica, and the contribution of its keys to dq of its pairs."""
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
        token_ptr += b * p_sb
        start_ptr += b * p_sb
        idx_ptr += (bh * num_queries + t0) * n
        stats_ptr += (bh * num_queries + t0) * G * 2
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        dq_ptr += bh * tl.minimum(chunk, num_queries) * n * G * DK

        first = first_key(
            tl.load(replicas_ptr), tl.load(order_ptr), idx_ptr, token_ptr, start_ptr, t0, num_keys,
            n, SIZE, HAS_POSITIONS,
        )  # fmt: skip
        masked = needs_mask(order_ptr, token_ptr, t0, first, num_keys, n, SIZE, BN, HAS_POSITIONS)
        key = first + tl.arange(0, BN)
        real_key = (key < first + SIZE) & (key >= 0) & (key < num_keys)
        # Columns of keys and queries are in two parts, so that the tile of dq, which needs registers in addition to
        # those of dk and dv, is narrower.
        low = tl.arange(0, LOW)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        k_row = k_ptr + key.to(tl.int64)[:, None] * k_st
        v_row = v_ptr + key.to(tl.int64)[:, None] * v_st
        k_low = tl.load(k_row + low, mask=real_key[:, None] & (low < DK), other=0.0)
        dk_low = tl.zeros([BN, LOW], tl.float32)
        if HIGH > 0:
            high = LOW + tl.arange(0, HIGH)[None, :]
            k_high = tl.load(k_row + high, mask=real_key[:, None] & (high < DK), other=0.0)
            dk_high = tl.zeros([BN, HIGH], tl.float32)
        v = tl.load(v_row + v_col, mask=real_key[:, None] & (v_col < DV), other=0.0)
        dv = tl.zeros([BN, BDV], tl.float32)
        key = tl.where(real_key, key, 2147483647)

        r = tl.arange(0, BM)
        ahead = tl.load(order_ptr + tl.minimum(row_of_tile(0, r, QUERIES, SPREAD, G)[0], count - 1))
        for i in range(tl.cdiv(count, QUERIES) * SPREAD):
            at, head, real = row_of_tile(i, r, QUERIES, SPREAD, G)
            real = real & (at < count)
            pair = ahead
            ahead = tl.load(order_ptr + tl.minimum(row_of_tile(i + 1, r, QUERIES, SPREAD, G)[0], count - 1))
            t = pair // n
            if WIDE:
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
            lse, delta = tl.split(tl.load(stat, mask=real[:, None], other=-1e30))
            s = tl.dot(k_low, tl.trans(q_low), tl.broadcast_to(lse[None, :], [BN, BM]), input_precision=PRECISION)
            if HIGH > 0:
                s = tl.dot(k_high, tl.trans(q_high), s, input_precision=PRECISION)
            p = tl.exp2(s * qk_scale)
            if i // SPREAD * QUERIES < masked:
                pair_again = tl.load(order_ptr + tl.minimum(at, count - 1))
                seen = sees(pair_again, key, idx_ptr, token_ptr, start_ptr, t0, n, SIZE, HAS_POSITIONS)
                p = tl.where(tl.trans(seen), p, 0.0)
            dp = tl.dot(v, tl.trans(do), tl.broadcast_to(delta[None, :], [BN, BM]), input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = (p * dp).to(q_low.dtype)
            dk_low = tl.dot(ds, q_low, dk_low, input_precision=PRECISION)
            if HIGH > 0:
                dk_high = tl.dot(ds, q_high, dk_high, input_precision=PRECISION)
            dq_row = dq_ptr + (pair.to(tl.int64) * G + head)[:, None] * DK
            dq = tl.dot(tl.trans(ds), k_low, input_precision=PRECISION) * scale
            dq = dq.to(dq_ptr.dtype.element_ty)
            tl.store(dq_row + low, dq, mask=real[:, None] & (low < DK))
            if HIGH > 0:
                dq = tl.dot(tl.trans(ds), k_high, input_precision=PRECISION) * scale
                dq = dq.to(dq_ptr.dtype.element_ty)
                tl.store(dq_row + high, dq, mask=real[:, None] & (high < DK))

        # An only replica adds to the gradients of earlier chunks; several replicas store theirs for sum_shared.
        slot = tl.load(replicas_ptr + 3 * num_replicas)
        col = tl.arange(0, BN)
        to = (bh * num_keys + first + col)[:, None]
        if slot >= 0:
            to = ((bh * num_shared + slot) * SIZE + col)[:, None]
            dk_ptr = dk_shared_ptr
            dv_ptr = dv_shared_ptr
        elif HAS_POSITIONS:
            real_key = real_key & (key <= tl.load(token_ptr + t0 + tl.load(order_ptr + count - 1) // n))
        real_key = real_key[:, None]
        _store(dk_ptr + to * DK + low, dk_low, real_key & (low < DK), slot)
        if HIGH > 0:
            _store(dk_ptr + to * DK + high, dk_high, real_key & (high < DK), slot)
        _store(dv_ptr + to * DV + v_col, dv, real_key & (v_col < DV), slot)


@jit
def _store(ptr, x, mask, slot):
    tl.store(ptr, x + tl.load(ptr, mask=mask & (slot < 0), other=0.0), mask=mask)
