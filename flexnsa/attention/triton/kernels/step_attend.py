# pyright: standard
"""Attention of a few queries to a cache: a program processes a split of their keys, for all heads of a group.

It stores *partial outputs*: for each query and head the output over these keys only, before division by the sum of
probabilities, with that sum and the largest score (base 2). The kernel ``merge`` joins them.
"""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.typed import jit


@jit
def load_queries(q_ptr, r, num_rows, bh, num_tokens, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load rows ``r = t * G + g`` of the queries ``(B, Hq, T, D)`` of a kv head."""
    d = tl.arange(0, BD)
    at = ((bh * G + r % G) * num_tokens + r // G)[:, None] * D + d[None, :]
    return tl.load(q_ptr + at, mask=(r < num_rows)[:, None] & (d < D)[None, :], other=0.0)


@jit
def load_keys(ptr, index, inside, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of contiguous keys or values."""
    d = tl.arange(0, BD)
    at = index.to(tl.int64)[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0)


@jit
def join(s, v, top, total, acc, HAS_V: tl.constexpr, PRECISION: tl.constexpr):
    """Add keys with scores ``s`` (``-inf`` where a query does not see one) to partial outputs."""
    new_top = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(p, 1)
    if HAS_V:
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_top, total, acc


@jit
def store_partial(
    top, total, acc, split, r, num_rows, bh, num_heads, num_tokens, part_ptr, top_ptr, total_ptr,
    G: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, HAS_V: tl.constexpr,
):  # fmt: skip
    """Store partial outputs as ``(splits, B, Hq, T)``."""
    at = split.to(tl.int64) * num_heads * num_tokens + (bh * G + r % G) * num_tokens + r // G
    inside = r < num_rows
    tl.store(top_ptr + at, top, mask=inside)
    tl.store(total_ptr + at, total, mask=inside)
    if HAS_V:
        d = tl.arange(0, BDV)
        tl.store(part_ptr + at[:, None] * DV + d[None, :], acc, mask=inside[:, None] & (d < DV)[None, :])


@jit(do_not_specialize=["num_heads", "num_tokens", "cmp_size", "win_size", "score_width"])
def attend_dense(
    q_ptr, where_ptr, k_cmp_ptr, v_cmp_ptr, k_win_ptr, v_win_ptr, score_ptr, part_ptr, top_ptr, total_ptr,
    num_heads, num_tokens, cmp_size, win_size, score_width, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, CMP_SPLITS: tl.constexpr, WIN_SPLITS: tl.constexpr, HAS_CMP: tl.constexpr,
    HAS_SCORES: tl.constexpr, HAS_V_CMP: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a split of the compressed tokens, whose scores are stored for the selection, or of the window."""
    split = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HKV
    num_rows = num_tokens * G
    r = tl.program_id(2) * BR + tl.arange(0, BR)
    q = load_queries(q_ptr, r, num_rows, bh, num_tokens, G, DK, BDK)
    token = tl.load(where_ptr + b * num_tokens + r // G, mask=r < num_rows, other=-1)
    earliest = tl.load(where_ptr + b * num_tokens)
    last = tl.load(where_ptr + b * num_tokens + num_tokens - 1)
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    n = tl.arange(0, BN)
    if HAS_CMP:
        if split < CMP_SPLITS:
            visible = tl.maximum(token + (1 + STRIDE - LENGTH), 0) // STRIDE
            most = tl.maximum(last + (1 + STRIDE - LENGTH), 0) // STRIDE
            chunk = tl.cdiv(tl.cdiv(most, CMP_SPLITS), BN) * BN
            k_ptr = k_cmp_ptr + bh * (cmp_size + 1) * DK
            v_ptr = v_cmp_ptr + bh * (cmp_size + 1) * DV
            scores = score_ptr + (bh * num_rows + r)[:, None] * score_width
            for first in tl.range(split * chunk, tl.minimum(split * chunk + chunk, most), BN):
                key = first + n
                inside = key < most
                k = load_keys(k_ptr, key, inside, DK, BDK)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
                s = tl.where(key[None, :] < visible[:, None], s, float("-inf"))
                if HAS_SCORES:
                    tl.store(scores + key[None, :], s, mask=(r < num_rows)[:, None] & inside[None, :])
                v = k
                if HAS_V_CMP:
                    v = load_keys(v_ptr, key, inside, DV, BDV)
                top, total, acc = join(s, v, top, total, acc, HAS_V_CMP, PRECISION)
    if split >= CMP_SPLITS:
        chunk = tl.cdiv(tl.cdiv(win_size, WIN_SPLITS), BN) * BN
        start = (split - CMP_SPLITS) * chunk
        k_ptr = k_win_ptr + bh * (win_size + 1) * DK
        v_ptr = v_win_ptr + bh * (win_size + 1) * DV
        for first in tl.range(start, tl.minimum(start + chunk, win_size), BN):
            slot = first + n
            # Token p is in slot p % size: a slot holds the last token that was written to it.
            age = (last - slot) % win_size
            age = tl.where(age < 0, age + win_size, age)
            holds = last - age
            # Mask slots of rewound tokens as before all windows; they may hold NaN, and 0 * NaN is NaN.
            inside = (slot < win_size) & (holds >= 0) & (holds > earliest - WINDOW)
            shown = inside[None, :] & (holds[None, :] <= token[:, None]) & (holds[None, :] > token[:, None] - WINDOW)
            k = load_keys(k_ptr, slot, inside, DK, BDK)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            v = load_keys(v_ptr, slot, inside, DV, BDV)
            top, total, acc = join(tl.where(shown, s, float("-inf")), v, top, total, acc, True, PRECISION)
    store_partial(
        top, total, acc, split, r, num_rows, bh, num_heads, num_tokens, part_ptr, top_ptr, total_ptr,
        G, DV, BDV, True,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "num_tokens", "slc_size", "first_split"])
def attend_selected(
    q_ptr, where_ptr, blocks_ptr, k_ptr, v_ptr, part_ptr, top_ptr, total_ptr,
    num_heads, num_tokens, slc_size, first_split, scale_log2,
    HKV: tl.constexpr, G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    SELECTED: tl.constexpr, PER_PROGRAM: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one query, all heads of its group, to some of the blocks that it selected."""
    bh = tl.program_id(1).to(tl.int64) // num_tokens
    t = tl.program_id(1) % num_tokens
    b = bh // HKV
    g = tl.program_id(2) * BR + tl.arange(0, BR)
    r = tl.where(g < G, t * G + g, num_tokens * G)
    q = load_queries(q_ptr, r, num_tokens * G, bh, num_tokens, G, DK, BDK)
    token = tl.load(where_ptr + b * num_tokens + t)
    k_ptr += bh * (slc_size + 1) * DK
    v_ptr += bh * (slc_size + 1) * DV
    top = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    n = tl.arange(0, BN)
    first = tl.program_id(0) * PER_PROGRAM
    for i in tl.range(first, tl.minimum(first + PER_PROGRAM, SELECTED)):
        block = tl.load(blocks_ptr + (bh * num_tokens + t) * SELECTED + i)
        if block >= 0:
            for offset in tl.range(0, BLOCK, BN):
                key = block * BLOCK + offset + n
                inside = (offset + n < BLOCK) & (key <= token)
                k = load_keys(k_ptr, key, inside, DK, BDK)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
                v = load_keys(v_ptr, key, inside, DV, BDV)
                top, total, acc = join(tl.where(inside[None, :], s, float("-inf")), v, top, total, acc, True, PRECISION)
    store_partial(
        top, total, acc, first_split + tl.program_id(0), r, num_tokens * G, bh, num_heads, num_tokens,
        part_ptr, top_ptr, total_ptr, G, DV, BDV, True,
    )  # fmt: skip
