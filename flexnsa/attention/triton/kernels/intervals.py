# pyright: standard, reportArgumentType=false
"""Attention to an interval of keys for each query: the compressed branch and the window.

Neither end of the interval decreases along the queries. So a tile of queries reads one run of keys, from the first that
its first query sees to the last that its last query sees, and a tile of keys one run of queries. Where every query of a
tile sees every key, no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import capped, count_visible, runs, through_cap

SUMMED_KEYS = 8
"""Keys of a program of :func:`sum_parts`: few, as short sequences of many parts need many programs."""


@jit(do_not_specialize=["p_sb", "num_heads", "num_queries", "num_keys"])
def forward(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, out_ptr, lse_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
    num_heads, num_queries, num_keys, qk_scale,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute the output and the natural log-sum-exp of a query tile, with a running maximum over its keys."""
    tile, bh = place(True, WINDOW)
    b = bh // num_heads
    h = bh % num_heads
    row = tile * BM + tl.arange(0, BM)
    inside = row < num_queries
    where = (token_ptr + b * p_sb, start_ptr + b * p_sb, first_ptr + b * p_sb, 0) if HAS_POSITIONS else None
    low, high = keys_of(row, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    high = tl.where(inside, high, low)
    q = load_rows(q_ptr + b * q_sb + h * q_sh, row, q_st, inside, DK, BDK)
    k_ptr += b * k_sb + (h // G) * k_sh
    v_ptr += b * v_sb + (h // G) * v_sh

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    begin, full, rest, end = runs(low, high, BN)
    for part in tl.static_range(3):
        first = begin if part == 0 else full if part == 1 else rest
        last = full if part == 0 else rest if part == 1 else end
        for key0 in tl.range(first, last, BN):
            key = key0 + tl.arange(0, BN)
            valid = (key < num_keys) | (part == 1)
            k = load_rows(k_ptr, key, k_st, valid, DK, BDK)
            s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, k.dtype)
            if part != 1:
                s = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1) * qk_scale)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: -inf - -inf would be NaN
            p = tl.exp2(s * qk_scale - shift[:, None])
            decay = tl.exp2(top - shift)
            total = total * decay + tl.sum(p, 1)
            v = load_rows(v_ptr, key, v_st, valid, DV, BDV)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
            top = new_top

    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(some)) * 0.6931471805599453)
    tl.store(lse_ptr + bh * num_queries + row, lse, mask=inside)
    store_rows(out_ptr + b * o_sb + h * o_sh, row, o_st, inside, acc / some[:, None], DV, BDV)


@jit(do_not_specialize=["p_sb", "num_heads", "num_queries", "num_keys"])
def backward_queries(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, stats_ptr, do_ptr, dq_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, s_sn, d_sb, d_sh, d_st, g_sb, g_sh, g_st,
    num_heads, num_queries, num_keys, scale,
    G: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a query tile."""
    tile, bh = place(True, WINDOW)
    b = bh // num_heads
    h = bh % num_heads
    row = tile * BM + tl.arange(0, BM)
    inside = row < num_queries
    where = (token_ptr + b * p_sb, start_ptr + b * p_sb, first_ptr + b * p_sb, 0) if HAS_POSITIONS else None
    low, high = keys_of(row, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    high = tl.where(inside, high, low)
    q = load_rows(q_ptr + b * q_sb + h * q_sh, row, q_st, inside, DK, BDK)
    do = load_rows(do_ptr + b * d_sb + h * d_sh, row, d_st, inside, DV, BDV)
    qk_scale = scale * 1.4426950408889634
    scale = scale * INNER if INNER != 0.0 else scale
    stats_ptr += bh * num_queries + row
    shift = tl.load(stats_ptr, mask=inside, other=0.0) * qk_scale
    delta = -tl.load(stats_ptr + s_sn, mask=inside, other=0.0)
    k_ptr += b * k_sb + (h // G) * k_sh
    v_ptr += b * v_sb + (h // G) * v_sh

    acc = tl.zeros([BM, BDK], tl.float32)
    begin, full, rest, end = runs(low, high, BN)
    for part in tl.static_range(3):
        first = begin if part == 0 else full if part == 1 else rest
        last = full if part == 0 else rest if part == 1 else end
        for key0 in tl.range(first, last, BN):
            key = key0 + tl.arange(0, BN)
            valid = (key < num_keys) | (part == 1)
            k = load_rows(k_ptr, key, k_st, valid, DK, BDK)
            s = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION), INNER, k.dtype)
            p = tl.exp2(s * qk_scale + shift[:, None])
            if part != 1:
                p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), p, 0.0)
            v = load_rows(v_ptr, key, v_st, valid, DV, BDV)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            acc = tl.dot(through_cap(ds, s, INNER).to(k.dtype), k, acc, input_precision=PRECISION)
    store_rows(dq_ptr + b * g_sb + h * g_sh, row, g_st, inside, acc * scale, DK, BDK)


@jit(do_not_specialize=["p_sb", "num_sums", "num_queries", "num_keys"])
def backward_keys(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, stats_ptr, do_ptr, dk_ptr, dv_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, s_sn, d_sb, d_sh, d_st,
    gk_sb, gk_sh, gk_st, gv_sb, gv_sh, gv_st, num_sums, num_queries, num_keys, scale,
    G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, LENGTH: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of a tile of keys and values over ``HEADS`` heads of the group."""
    tile, bs = place(False, WINDOW)
    b = bs // num_sums
    at = bs % num_sums
    h = at * HEADS
    key0 = tile * BN
    key = key0 + tl.arange(0, BN)
    valid = key < num_keys
    k = load_rows(k_ptr + b * k_sb + (h // G) * k_sh, key, k_st, valid, DK, BDK)
    v = load_rows(v_ptr + b * v_sb + (h // G) * v_sh, key, v_st, valid, DV, BDV)
    where = (token_ptr + b * p_sb, start_ptr + b * p_sb, first_ptr + b * p_sb, 0) if HAS_POSITIONS else None
    row0 = first_row_past(key0, True, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    end = first_row_past(key0 + BN - 1, False, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    tiles = tl.cdiv(tl.maximum(end - row0, 0), BM)
    q_ptr += b * q_sb + h * q_sh
    do_ptr += b * d_sb + h * d_sh
    stats_ptr += bs * HEADS * num_queries

    dk = tl.zeros([BN, BDK], tl.float32)
    dv = tl.zeros([BN, BDV], tl.float32)
    qk_scale = scale * 1.4426950408889634
    scale = scale * INNER if INNER != 0.0 else scale
    for i in tl.range(0, HEADS * tiles):
        head = (i // tiles).to(tl.int64)
        first = row0 + (i % tiles) * BM
        row = first + tl.arange(0, BM)
        inside = row < num_queries
        q = load_rows(q_ptr + head * q_sh, row, q_st, inside, DK, BDK)
        do = load_rows(do_ptr + head * d_sh, row, d_st, inside, DV, BDV)
        # Minus a negation, not plus: Triton would begin the product with delta, and wait for it in every iteration.
        stat = stats_ptr + head * num_queries + row
        shift = tl.load(stat, mask=inside, other=0.0) * qk_scale
        delta = -tl.load(stat + s_sn, mask=inside, other=0.0)
        s = capped(tl.dot(k, tl.trans(q), input_precision=PRECISION), INNER, q.dtype)
        p = tl.exp2(s * qk_scale + shift[None, :])
        # Without positions a query is its token, which tells whether all queries of this tile see all of the keys.
        # Rows past the end need no mask: their q and do are 0.
        whole = first >= (key0 + BN - 1) * STRIDE + LENGTH - 1
        if WINDOW > 0:
            whole &= first + BM <= key0 + WINDOW
        if HAS_POSITIONS or not whole:
            low, high = keys_of(row, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
            p = tl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), p, 0.0)
        # Products of dk and dv come last: Triton then runs them while the next rows are loaded.
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        ds = through_cap(ds, s, INNER).to(q.dtype)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    store_rows(dk_ptr + b * gk_sb + at * gk_sh, key, gk_st, valid, dk * scale, DK, BDK)
    store_rows(dv_ptr + b * gv_sb + at * gv_sh, key, gv_st, valid, dv, DV, BDV)


def add_parts(parts: Sequence[Tensor], dk: Tensor, dv: Tensor, *, scale: float = 1.0) -> None:
    """Sum the parts of each key head in a fixed order into ``dk``, times ``scale``, and ``dv``.

    Args:
        parts: of keys and of values, float32 ``(B, Hkv * parts, S, D)``, contiguous.
        dk: ``(B, Hkv, S, Dk)``, with contiguous rows.
        dv: ``(B, Hkv, S, Dv)``, likewise.
        scale: factor of the gradients of keys.
    """
    (batch, heads, num_keys, d_k), d_v = dk.shape, dv.shape[-1]
    sum_parts[(cdiv(num_keys, SUMMED_KEYS), batch * heads)](
        *parts, dk, dv, *dk.stride()[:3], *dv.stride()[:3], heads, num_keys, scale,
        PARTS=parts[0].shape[1] // heads, DK=d_k, DV=d_v, BDK=padded(d_k), BDV=padded(d_v), BN=SUMMED_KEYS, num_warps=4,
    )  # fmt: skip


@jit(do_not_specialize=["num_heads", "num_keys"])
def sum_parts(
    dk_part_ptr, dv_part_ptr, dk_ptr, dv_ptr, gk_sb, gk_sh, gk_st, gv_sb, gv_sh, gv_st, num_heads, num_keys, scale,
    PARTS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a tile of keys and values, one after the other."""
    bh = tl.program_id(1).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    valid = key < num_keys
    dk = tl.zeros([BN, BDK], tl.float32)
    dv = tl.zeros([BN, BDV], tl.float32)
    for part in tl.static_range(PARTS):
        first = (bh * PARTS + part) * num_keys
        dk += load_rows(dk_part_ptr + first * DK, key, DK, valid, DK, BDK)
        dv += load_rows(dv_part_ptr + first * DV, key, DV, valid, DV, BDV)
    store_rows(dk_ptr + b * gk_sb + h * gk_sh, key, gk_st, valid, dk * scale, DK, BDK)
    store_rows(dv_ptr + b * gv_sb + h * gv_sh, key, gv_st, valid, dv, DV, BDV)


@jit
def place(LONGEST_LAST: tl.constexpr, WINDOW: tl.constexpr):
    """Return the tile of a program, and its batch element and heads.

    Without a window tiles take unequal times, and programs begin in order: the longest tiles of all heads come first.
    """
    tile = tl.program_id(0)
    heads = tl.program_id(1)
    if WINDOW == 0:
        number = heads * tl.num_programs(0) + tile
        tile = number // tl.num_programs(1)
        heads = number % tl.num_programs(1)
        if LONGEST_LAST:
            tile = tl.num_programs(0) - 1 - tile
    return tile, heads.to(tl.int64)


@jit
def keys_of(row, where, num_queries, num_keys, LENGTH: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the keys ``low .. high - 1`` that each query sees.

    Key ``first + i`` covers ``LENGTH`` tokens from token ``i * STRIDE`` of the document on, and is seen when it is
    complete. With a ``WINDOW`` a key is a token, and only the last so many are seen. ``where`` is None for one whole
    sequence, which has code of its own. Else it has pointers to each query's token, its document's first token and
    first key, and the offset of the batch element in these tables.
    """
    token = row
    start = row * 0
    first = row * 0
    if where is not None:
        token_ptr, start_ptr, first_ptr, at = where
        there = at + tl.minimum(row, num_queries - 1)
        token = tl.load(token_ptr + there)
        start = tl.load(start_ptr + there)
        first = tl.load(first_ptr + there)
    high = tl.minimum(first + count_visible(token - start, LENGTH, STRIDE), num_keys)
    low = tl.maximum(first, 0)
    if WINDOW > 0:
        low = tl.maximum(token - (WINDOW - 1), low)
    return low, high


@jit
def first_row_past(
    key, END: tl.constexpr, where, num_queries, num_keys, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the first query whose interval begins after a key, or with ``END`` ends after it."""
    if where is not None:
        row = key * 0
        last = num_queries + row
        while row < last:
            middle = (row + last) // 2
            low, high = keys_of(middle, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
            past = high > key if END else low > key
            row = tl.where(past, row, middle + 1)
            last = tl.where(past, middle, last)
        return row
    else:  # noqa: RET505  (a kernel needs both)
        row = num_queries
        if END:
            row = tl.minimum(key * STRIDE + LENGTH - 1, num_queries)
        elif WINDOW > 0:
            row = tl.minimum(key + WINDOW, num_queries)
        return row


@jit
def load_rows(ptr, row, stride, inside, D: tl.constexpr, BD: tl.constexpr):
    """Load rows of ``D`` columns, padded with 0 to ``BD``."""
    col = tl.arange(0, BD)[None, :]
    ptrs = ptr + row.to(tl.int64)[:, None] * stride + col
    if D == BD:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    else:  # noqa: RET505  (a kernel needs both)
        return tl.load(ptrs, mask=inside[:, None] & (col < D), other=0.0)


@jit
def store_rows(ptr, row, stride, inside, x, D: tl.constexpr, BD: tl.constexpr):
    """Store the first ``D`` of ``BD`` columns."""
    col = tl.arange(0, BD)[None, :]
    ptrs = ptr + row.to(tl.int64)[:, None] * stride + col
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=inside[:, None] & (col < D))
