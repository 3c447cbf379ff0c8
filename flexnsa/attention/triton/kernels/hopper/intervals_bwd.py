# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
"""Attention to an interval of keys for each query, backward; see :mod:`flexnsa.attention.triton.kernels.intervals`."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flexnsa.attention.triton.kernels.gluon import async_load, gluon_jit
from flexnsa.attention.triton.kernels.hopper.rows import copy_rows, load_rows, product_layout, product_with, store_rows
from flexnsa.attention.triton.kernels.intervals import keys_of, place
from flexnsa.attention.triton.kernels.visible import capped, through_cap


@gluon_jit(do_not_specialize=["p_sb", "num_heads", "num_queries", "num_keys"])
def hopper_backward_queries(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, stats_ptr, do_ptr, dq_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, s_sn, d_sb, d_sh, d_st, g_sb, g_sh, g_st,
    num_heads, num_queries, num_keys, scale,
    G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr,
    WINDOW: gl.constexpr, HAS_POSITIONS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr,
    BUFFERS: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of a query tile."""
    tile, bh = place(True, WINDOW)
    b = bh // num_heads
    h = bh % num_heads
    where = (token_ptr, start_ptr, first_ptr, (b * p_sb).to(gl.int32)) if HAS_POSITIONS else None
    dq = gradient_of_queries(
        q_ptr + b * q_sb + h * q_sh, k_ptr + b * k_sb + (h // G) * k_sh, v_ptr + b * v_sb + (h // G) * v_sh, where,
        stats_ptr + bh * num_queries, do_ptr + b * d_sb + h * d_sh, tile * BM, q_st, k_st, v_st, s_sn, d_st,
        num_queries, num_keys, scale, DK, DV, LENGTH, STRIDE, WINDOW, BM, BN, INNER, BUFFERS,
    )  # fmt: skip
    store_rows(dq_ptr + b * g_sb + h * g_sh, tile * BM, num_queries, g_st, dq, DK)


@gluon_jit
def gradient_of_queries(
    q_ptr, k_ptr, v_ptr, where, stats_ptr, do_ptr, row0, q_st, k_st, v_st, s_sn, d_st, num_queries, num_keys, scale,
    DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Return the gradient of the queries from ``row0`` on; dP runs while the exponentials do."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma_s: gl.constexpr = product_layout(BN, gl.num_warps())
    mma_q: gl.constexpr = product_layout(DK, gl.num_warps())
    of_rows: gl.constexpr = gl.SliceLayout(1, mma_s)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    # Some query sees the keys from begin to end, all see those from full to rest.
    begin, rest = keys_of(row0, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    last = gl.minimum(row0 + BM, num_queries) - 1
    full, end = keys_of(last, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    tiles = (gl.maximum(end - begin, 0) + BN - 1) // BN

    k_tiles = gl.allocate_shared_memory(dtype, [BUFFERS, BN, DK], swizzled)
    v_tiles = gl.allocate_shared_memory(dtype, [BUFFERS, BN, DV], swizzled)
    for i in gl.static_range(BUFFERS - 1):
        copy_rows(k_tiles.index(i), k_ptr, begin + i * BN, end, k_st, DK)
        copy_rows(v_tiles.index(i), v_ptr, begin + i * BN, end, v_st, DV)
        async_copy.commit_group()

    q = load_rows(q_ptr, row0, num_queries, q_st, DK)
    do = load_rows(do_ptr, row0, num_queries, d_st, DV)
    row = row0 + gl.arange(0, BM, of_rows)
    qk_scale = scale * 1.4426950408889634
    scale = scale * INNER if INNER != 0.0 else scale
    stats_ptr += row
    shift = gl.load(stats_ptr, mask=row < num_queries, other=0.0) * qk_scale
    delta = gl.load(stats_ptr + s_sn, mask=row < num_queries, other=0.0)
    low, high = keys_of(row, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    seen = gl.maximum(high - low, 0).to(gl.uint32)
    column = gl.arange(0, BN, gl.SliceLayout(0, mma_s))
    dq = gl.zeros([BM, DK], gl.float32, mma_q)
    fence_async_shared()
    for i in range(tiles):
        # All products of the previous tile are done: after the barrier that this adds, its buffers are free.
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        k = k_tiles.index(i % BUFFERS)
        s = product_with(q, k, mma_s)
        dp = product_with(do, v_tiles.index(i % BUFFERS), mma_s)
        key0 = begin + i * BN
        ahead = i + BUFFERS - 1
        if ahead < tiles:
            copy_rows(k_tiles.index(ahead % BUFFERS), k_ptr, begin + ahead * BN, end, k_st, DK)
            copy_rows(v_tiles.index(ahead % BUFFERS), v_ptr, begin + ahead * BN, end, v_st, DV)
        async_copy.commit_group()
        s = capped(warpgroup_mma_wait(1, deps=[s]), INNER)
        p = gl.exp2(s * qk_scale + shift[:, None])
        if (key0 < full) | (key0 + BN > rest):
            at = (key0 - low)[:, None] + column[None, :]
            p = gl.where(at.to(gl.uint32) < seen[:, None], p, 0.0)
        p = through_cap(p, s, INNER)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = gl.convert_layout((p * (dp + delta[:, None])).to(dtype), gl.DotOperandLayout(0, mma_q, 2))
        dq = warpgroup_mma(ds, k, dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    async_copy.wait_group(0)
    return dq * scale


@gluon_jit(do_not_specialize=["p_sb", "num_sums", "num_queries", "num_keys"])
def hopper_backward_keys(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, stats_ptr, do_ptr, dk_ptr, dv_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, s_sn, d_sb, d_sh, d_st,
    gk_sb, gk_sh, gk_st, gv_sb, gv_sh, gv_st, num_sums, num_queries, num_keys, scale,
    G: gl.constexpr, HEADS: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr,
    STRIDE: gl.constexpr, WINDOW: gl.constexpr, HAS_POSITIONS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BUFFERS: gl.constexpr, INNER: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Sum the gradients of a tile of keys and values over ``HEADS`` heads of the group.

    dP runs while the exponentials do, and dv while dS is computed. Copies begin before the exponentials or, where they
    are ``LATE``, while dk is computed.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma_s: gl.constexpr = product_layout(BM, gl.num_warps())
    mma_k: gl.constexpr = product_layout(DK, gl.num_warps())
    mma_v: gl.constexpr = product_layout(DV, gl.num_warps())
    of_rows: gl.constexpr = gl.SliceLayout(0, mma_s)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    tile, bs = place(False, WINDOW)
    b = bs // num_sums
    at = bs % num_sums
    h = at * HEADS
    key0 = tile * BN
    # Queries from row0 to end see a key of this tile, and those from whole to partial all of its keys.
    if HAS_POSITIONS:
        where = token_ptr, start_ptr, first_ptr, (b * p_sb).to(gl.int32)
        key = gl.minimum(key0 + gl.arange(0, BN, gl.SliceLayout(1, mma_s)), num_keys - 1)
        begin, past = _queries_of(key, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
        span = (past - begin).to(gl.uint32)[:, None]
        row0 = gl.min(begin, 0)
        whole = gl.max(begin, 0)
        end = gl.max(past, 0)
        partial = gl.min(past, 0)
    else:
        row0 = gl.minimum(key0 * STRIDE + LENGTH - 1, num_queries)
        whole = (key0 + BN - 1) * STRIDE + LENGTH - 1
        end = num_queries
        partial = num_queries + BM
        if WINDOW > 0:
            end = gl.minimum(key0 + BN - 1 + WINDOW, num_queries)
            partial = key0 + WINDOW
    total = HEADS * ((gl.maximum(end - row0, 0) + BM - 1) // BM)

    q_tiles = gl.allocate_shared_memory(dtype, [BUFFERS, BM, DK], swizzled)
    do_tiles = gl.allocate_shared_memory(dtype, [BUFFERS, BM, DV], swizzled)
    stats = gl.allocate_shared_memory(gl.float32, [BUFFERS, 2 * BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_ptr += b * q_sb + h * q_sh
    do_ptr += b * d_sb + h * d_sh
    stats_ptr += bs * HEADS * num_queries
    row = row0  # the first query of the tile that is copied next
    for i in gl.static_range(BUFFERS - 1):
        row, q_ptr, do_ptr, stats_ptr = _copy_next(
            i < total, q_tiles, do_tiles, stats, i, row, q_ptr, do_ptr, stats_ptr,
            row0, end, num_queries, q_sh, q_st, d_sh, d_st, s_sn,
        )  # fmt: skip

    k = load_rows(k_ptr + b * k_sb + (h // G) * k_sh, key0, num_keys, k_st, DK)
    v = load_rows(v_ptr + b * v_sb + (h // G) * v_sh, key0, num_keys, v_st, DV)
    dk = gl.zeros([BN, DK], gl.float32, mma_k)
    dv = gl.zeros([BN, DV], gl.float32, mma_v)
    qk_scale = scale * 1.4426950408889634
    scale = scale * INNER if INNER != 0.0 else scale
    # The first query that sees a key; keys past the end are not stored, so they may be seen.
    if not HAS_POSITIONS:
        begin = (key0 + gl.arange(0, BN, gl.SliceLayout(1, mma_s))) * STRIDE + LENGTH - 1
        span = WINDOW
    column = gl.arange(0, BM, of_rows)
    now = row0
    fence_async_shared()
    for i in range(total):
        # All products of the previous tile are done: after the barrier that this adds, its buffers are free.
        async_copy.wait_group(BUFFERS - 2)
        fence_async_shared()
        q = q_tiles.index(i % BUFFERS)
        do = do_tiles.index(i % BUFFERS)
        stat = stats.index(i % BUFFERS)
        s = product_with(k, q, mma_s)
        dp = product_with(v, do, mma_s)
        first = now
        now = gl.where(now + BM >= end, row0, now + BM)
        ahead = i + BUFFERS - 1
        buffer = ahead % BUFFERS
        if not LATE:
            row, q_ptr, do_ptr, stats_ptr = _copy_next(
                ahead < total, q_tiles, do_tiles, stats, buffer, row, q_ptr, do_ptr, stats_ptr,
                row0, end, num_queries, q_sh, q_st, d_sh, d_st, s_sn,
            )  # fmt: skip
        shift = stat.slice(0, BM).load(of_rows) * qk_scale
        s = capped(warpgroup_mma_wait(1, deps=[s]), INNER)
        p = gl.exp2(s * qk_scale + shift[None, :])
        # Rows past the end need no mask: their q and do are 0.
        if (first < whole) | (first + BM > partial):
            age = (first - begin)[:, None] + column[None, :]
            p = gl.where((age.to(gl.uint32) < span) if HAS_POSITIONS or WINDOW > 0 else (age >= 0), p, 0.0)
        p_low = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma_v, 2))
        dv = warpgroup_mma(p_low, do, dv, is_async=True)
        p = through_cap(p, s, INNER)
        # Not where dP begins: the assembler would wait for S before it writes registers of the next product.
        delta = stat.slice(BM, BM).load(of_rows)
        dp = warpgroup_mma_wait(1, deps=[dp]) + delta[None, :]
        ds = gl.convert_layout((p * dp).to(dtype), gl.DotOperandLayout(0, mma_k, 2))
        dk = warpgroup_mma(ds, q, dk, is_async=True)
        if LATE:
            row, q_ptr, do_ptr, stats_ptr = _copy_next(
                ahead < total, q_tiles, do_tiles, stats, buffer, row, q_ptr, do_ptr, stats_ptr,
                row0, end, num_queries, q_sh, q_st, d_sh, d_st, s_sn,
            )  # fmt: skip
        dv, p_low, dk, ds = warpgroup_mma_wait(0, deps=[dv, p_low, dk, ds])
    async_copy.wait_group(0)
    store_rows(dk_ptr + b * gk_sb + at * gk_sh, key0, num_keys, gk_st, dk * scale, DK)
    store_rows(dv_ptr + b * gv_sb + at * gv_sh, key0, num_keys, gv_st, dv, DV)


@gluon_jit
def _queries_of(
    key, where, num_queries, num_keys, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Return the queries ``begin .. end - 1`` that see keys, found by bisection; no key may be past the last one."""
    begin = key * 0
    end = key * 0
    size = num_queries
    while size > 0:
        half = (size + 1) // 2
        _, high = keys_of(begin + (half - 1), where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
        low, _ = keys_of(end + (half - 1), where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
        begin += gl.where(high > key, 0, half)
        end += gl.where(low > key, 0, half)
        size = size // 2
    return begin, end


@gluon_jit
def _copy_next(
    exists, q_tiles, do_tiles, stats, buffer, row, q_ptr, do_ptr, stats_ptr,
    row0, end, num_queries, q_sh, q_st, d_sh, d_st, s_sn,
):  # fmt: skip
    """Begin to copy the tile of queries from ``row`` on, and return where the next one is.

    After the last tile of a head comes the first one of the next head.
    """
    ROWS: gl.constexpr = q_tiles.shape[1]
    DK: gl.constexpr = q_tiles.shape[2]
    DV: gl.constexpr = do_tiles.shape[2]
    ANEW: gl.constexpr = DK + DV > 128
    if exists:
        _copy_stats(stats.index(buffer), stats_ptr, row, s_sn, num_queries, ROWS)
        copy_rows(q_tiles.index(buffer), q_ptr, row, num_queries, q_st, DK, ANEW)
        copy_rows(do_tiles.index(buffer), do_ptr, row, num_queries, d_st, DV, ANEW)
    async_copy.commit_group()
    last = row + ROWS >= end
    q_ptr += gl.where(last, q_sh, 0)
    do_ptr += gl.where(last, d_sh, 0)
    stats_ptr += gl.where(last, num_queries, 0)
    return gl.where(last, row0, row + ROWS), q_ptr, do_ptr, stats_ptr


@gluon_jit
def _copy_stats(to, ptr, first, second, end, ROWS: gl.constexpr):
    """Begin to copy both stats of a tile of rows, of all rows the first before the second; zeros from ``end`` on."""
    number = gl.arange(0, 2 * ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = number % ROWS
    at = ptr + first + (number // ROWS * second + row)
    async_load(to, at, first + row < end)
