# pyright: standard, reportGeneralTypeIssues=false
"""Selected attention, forward; see :mod:`flexnsa.attention.triton.selected_forward`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.selected_pairs import (
    first_key,
    load_row,
    locate,
    needs_mask,
    row_of_tile,
    sees,
)
from flexnsa.attention.triton.kernels.visible import load_positions
from flexnsa.attention.triton.typed import jit


@jit(do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index", "num_chunks", "num_replicas"])
def forward_parts(
    q_ptr, k_ptr, v_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr, po_ptr, pl_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, qk_scale,
    n: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, QUERIES: tl.constexpr, SPREAD: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
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
        token_ptr += b * p_sb
        start_ptr += b * p_sb
        idx_ptr += (bh * num_queries + t0) * n
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        po_ptr += bh * rows * n * G * DV
        pl_ptr += bh * rows * n * G

        first = first_key(
            tl.load(replicas_ptr), tl.load(order_ptr), idx_ptr, token_ptr, start_ptr, t0, num_keys,
            n, SIZE, HAS_POSITIONS,
        )  # fmt: skip
        masked = needs_mask(order_ptr, token_ptr, t0, first, num_keys, n, SIZE, BN, HAS_POSITIONS)
        key = first + tl.arange(0, BN)
        real_key = (key < first + SIZE) & (key >= 0) & (key < num_keys)
        low = tl.arange(0, LOW)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        k_row = k_ptr + key.to(tl.int64)[:, None] * k_st
        v_row = v_ptr + key.to(tl.int64)[:, None] * v_st
        k_low = tl.trans(tl.load(k_row + low, mask=real_key[:, None] & (low < DK), other=0.0))
        if HIGH > 0:
            high = LOW + tl.arange(0, HIGH)[None, :]
            k_high = tl.trans(tl.load(k_row + high, mask=real_key[:, None] & (high < DK), other=0.0))
        v = tl.load(v_row + v_col, mask=real_key[:, None] & (v_col < DV), other=0.0)
        key = tl.where(real_key, key, 2147483647)

        r = tl.arange(0, BM)
        ahead = tl.load(order_ptr + tl.minimum(row_of_tile(0, r, QUERIES, SPREAD, G)[0], count - 1))
        for i in range(tl.cdiv(count, QUERIES) * SPREAD):
            at, head, real = row_of_tile(i, r, QUERIES, SPREAD, G)
            real = real & (at < count)
            pair = ahead
            # The next tile's query indices are loaded one tile early, to hide the latency of loading their rows.
            ahead = tl.load(order_ptr + tl.minimum(row_of_tile(i + 1, r, QUERIES, SPREAD, G)[0], count - 1))
            t = pair // n
            if WIDE:
                q_row = (q_ptr + (t.to(tl.int64) * q_st + head.to(tl.int64) * q_sg))[:, None]
            else:
                q_row = (q_ptr + (t * q_st + head * q_sg))[:, None]
            s = tl.dot(load_row(q_row, low, DK, LOW), k_low, input_precision=PRECISION)
            if HIGH > 0:
                s = tl.dot(load_row(q_row, high, DK, LOW + HIGH), k_high, s, input_precision=PRECISION)
            if i // SPREAD * QUERIES < masked:
                seen = sees(pair, key, idx_ptr, token_ptr, start_ptr, t0, n, SIZE, HAS_POSITIONS)
                s = tl.where(seen, s, float("-inf"))
            top = tl.max(s, 1) * qk_scale
            top = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s * qk_scale - top[:, None])
            total = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
            some = tl.where(total == 0.0, 1.0, total)
            o *= (1.0 / some)[:, None]
            row = pair.to(tl.int64) * G + head
            tl.store(pl_ptr + row, tl.where(total == 0.0, float("-inf"), top + tl.log2(some)), mask=real)
            to = po_ptr + row[:, None] * DV + v_col
            tl.store(to, o.to(po_ptr.dtype.element_ty), mask=real[:, None] & (v_col < DV))


@jit(do_not_specialize=["p_sb", "gates_of_branch", "kv_heads", "num_queries", "num_keys", "chunk", "index"])
def combine(
    po_ptr, pl_ptr, idx_ptr, token_ptr, start_ptr, p_sb, out_ptr, lse_ptr, o_sb, o_sh, o_sg, o_st,
    cmp_ptr, win_ptr, gate_ptr, sum_ptr, s_sb, s_sh, s_sg, s_st, gates_of_branch,
    kv_heads, num_queries, num_keys, chunk, index,
    n: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    BDV: tl.constexpr, BR: tl.constexpr, ALONE: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
    tl.store(out_ptr + at, out, mask=mask)
    if not ALONE:
        gate_ptr += (bh * G + g) * num_queries + t
        cmp_gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)[:, None]
        slc_gate = tl.load(gate_ptr + gates_of_branch, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = cmp_gate * tl.load(cmp_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total += slc_gate * out.to(tl.float32)
        if HAS_WINDOW:
            win_gate = tl.load(gate_ptr + 2 * gates_of_branch, mask=inside, other=0.0).to(tl.float32)[:, None]
            total += win_gate * tl.load(win_ptr + at, mask=mask, other=0.0).to(tl.float32)
        sum_row = sum_ptr + b * s_sb + h * s_sh + g * s_sg + t * s_st
        tl.store(sum_row[:, None] + col, total.to(sum_ptr.dtype.element_ty), mask=mask)
