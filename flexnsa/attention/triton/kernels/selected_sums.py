# pyright: standard, reportGeneralTypeIssues=false
"""Sums after the products of the backward pass: over replicas and slots."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.selected_pairs import first_key, has_parity, locate
from flexnsa.attention.triton.kernels.visible import load_positions
from flexnsa.attention.triton.typed import jit


@jit(
    do_not_specialize=[
        "p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index", "num_chunks", "num_replicas", "num_shared",
        "parity",
    ]
)  # fmt: skip
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
        idx_ptr += (bh * num_queries + t0) * n
        order_ptr += (bh * num_queries + t0) * n + tl.load(replicas_ptr + 2 * num_replicas)
        first = first_key(
            tl.load(replicas_ptr), tl.load(order_ptr), idx_ptr, token_ptr + at, start_ptr + at, t0, num_keys,
            n, SIZE, HAS_POSITIONS,
        )  # fmt: skip
        slot = tl.load(replicas_ptr + 3 * num_replicas)
        row = tl.program_id(0) % (BN // ROWS) * ROWS + tl.arange(0, ROWS)
        key = first + row
        real = (row < SIZE) & (key >= 0) & (key < num_keys)
        if HAS_POSITIONS:
            final = replicas_ptr + replicas - 1
            end = tl.load(final + 2 * num_replicas) + tl.load(final + num_replicas)
            last = tl.load(order_ptr + end - tl.load(replicas_ptr + 2 * num_replicas) - 1) // n
            real = real & (key <= tl.load(token_ptr + at + t0 + last))
        real = real[:, None]
        k_col = tl.arange(0, BDK)[None, :]
        v_col = tl.arange(0, BDV)[None, :]
        to = (bh * num_keys + key)[:, None]
        dk = tl.load(dk_ptr + to * DK + k_col, mask=real & (k_col < DK), other=0.0)
        dv = tl.load(dv_ptr + to * DV + v_col, mask=real & (v_col < DV), other=0.0)
        for i in range(replicas):
            part = ((bh * num_shared + slot + i) * SIZE + row)[:, None]
            dk += tl.load(dk_shared_ptr + part * DK + k_col, mask=real & (k_col < DK), other=0.0)
            dv += tl.load(dv_shared_ptr + part * DV + v_col, mask=real & (v_col < DV), other=0.0)
        tl.store(dk_ptr + to * DK + k_col, dk, mask=real & (k_col < DK))
        tl.store(dv_ptr + to * DV + v_col, dv, mask=real & (v_col < DV))


@jit(do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index"])
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
