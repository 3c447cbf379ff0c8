# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Selected attention, backward; see :mod:`flexnsa.attention.triton.kernels.selected_bwd`.

S and dP of a tile are issued together, so dP overlaps exponentials; dv is issued as soon as P is there, and dk runs
while dq is stored. The rows of the next tile are copied meanwhile.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flexnsa.attention.triton.kernels.gluon import async_load, barrier, gluon_jit
from flexnsa.attention.triton.kernels.hopper.rows import copy_gathered, load_rows, product_layout, store_layout
from flexnsa.attention.triton.kernels.selected_pairs import OF_CHUNK, OF_REPLICAS, count_masked, first_key, keys_of_pair
from flexnsa.attention.triton.kernels.visible import capped, through_cap


@gluon_jit(do_not_specialize=[*OF_CHUNK, *OF_REPLICAS])
def hopper_backward_parts(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr,
    dq_ptr, dk_ptr, dv_ptr, dk_shared_ptr, dv_shared_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, d_sb, d_sh, d_sg, d_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, num_shared, parity, scale, qk_scale,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, SIZE: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one replica, and the contribution of its keys to dq of its pairs, ``DQ`` columns at a time.

    Rows without a query are zeros in q, do and stats: their dS is 0.
    """
    QUERIES: gl.constexpr = BM // G
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma_s: gl.constexpr = product_layout(BM)
    mma_k: gl.constexpr = product_layout(DK)
    mma_v: gl.constexpr = product_layout(DV)
    mma_q: gl.constexpr = product_layout(DQ)
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    bh = gl.program_id(1).to(gl.int64)
    replicas_ptr += (bh * num_chunks + index) * 5 * num_replicas + gl.program_id(0)
    count = gl.load(replicas_ptr + num_replicas)
    if (count > 0) & (gl.load(replicas_ptr) % 2 == parity) if HAS_POSITIONS else count > 0:
        b = bh // kv_heads
        h = bh % kv_heads
        t0 = chunk * index
        q_ptr += b * q_sb + h * q_sh + t0.to(gl.int64) * q_st
        do_ptr += b * d_sb + h * d_sh + t0.to(gl.int64) * d_st
        stats_ptr += (bh * num_queries + t0) * G * 2
        order_ptr += (bh * num_queries + t0) * n + gl.load(replicas_ptr + 2 * num_replicas)
        dq_ptr += bh * gl.minimum(chunk, num_queries) * n * G * DK

        where = None
        if HAS_POSITIONS:
            where = idx_ptr + (bh * num_queries + t0) * n, token_ptr, start_ptr, (b * p_sb + t0).to(gl.int32)
        begin = first_key(gl.load(replicas_ptr), gl.load(order_ptr), where, n, SIZE)
        first = gl.maximum(begin, 0) if HAS_POSITIONS else begin
        end = gl.minimum(begin + SIZE, num_keys)
        # So many queries, first in the list, may not see the whole key tile.
        masked = gl.where(end < first + BN, 2147483647, count_masked(begin, order_ptr, where, t0, n, SIZE))

        q_tiles = gl.allocate_shared_memory(dtype, [2, BM, DK], swizzled)
        do_tiles = gl.allocate_shared_memory(dtype, [2, BM, DV], swizzled)
        ds_tile = gl.allocate_shared_memory(dtype, [BN, BM], swizzled)
        q_at = gl.allocate_shared_memory(gl.int32, [BM], plain)  # offsets of rows, of the next tile to copy
        do_at = gl.allocate_shared_memory(gl.int32, [BM], plain)
        dq_at = gl.allocate_shared_memory(gl.int32, [4, BM], plain)  # rows of dq, from the current tile on
        lse_of = gl.allocate_shared_memory(gl.float32, [2, BM], plain)
        delta_of = gl.allocate_shared_memory(gl.float32, [2, BM], plain)

        # Every thread prepares one row of the tiles to come: it loads its pair at least one tile before it uses it.
        r = gl.arange(0, BM, row_layout)
        query = gl.where(r // QUERIES < G, r % QUERIES, 1 << 30)
        head = gl.minimum(r // QUERIES, G - 1)
        pair = _load_pairs(order_ptr, query, count)
        later = _load_pairs(order_ptr, query + QUERIES, count)
        _place(q_at, do_at, dq_at.index(0), pair, head, q_sg, q_st, d_sg, d_st, n, G)
        barrier()
        _copy_tile(
            q_tiles.index(0), do_tiles.index(0), lse_of.index(0), delta_of.index(0),
            q_ptr, do_ptr, stats_ptr, q_at, do_at, pair, head, n, G, DK, DV,
        )  # fmt: skip
        barrier()
        _place(q_at, do_at, dq_at.index(1), later, head, q_sg, q_st, d_sg, d_st, n, G)
        pair = later
        later = _load_pairs(order_ptr, query + 2 * QUERIES, count)

        k_tile = load_rows(k_ptr + b * k_sb + h * k_sh, first, end, k_st, DK)
        v_tile = load_rows(v_ptr + b * v_sb + h * v_sh, first, end, v_st, DV)
        key = first + gl.arange(0, BN, gl.SliceLayout(1, mma_s))
        key = gl.where(key < end, key, 2147483647)
        dk = gl.zeros([BN, DK], gl.float32, mma_k)
        dv = gl.zeros([BN, DV], gl.float32, mma_v)
        fence_async_shared()
        for i in range((count + QUERIES - 1) // QUERIES):
            # All products of the previous tile are done: after the barrier that this adds, its buffers are free.
            async_copy.wait_group(0)
            fence_async_shared()
            now = i % 2
            q = q_tiles.index(now)
            do = do_tiles.index(now)
            s = _product_from(k_tile, q, lse_of.index(now), mma_s)
            dp = _product_from(v_tile, do, delta_of.index(now), mma_s)
            _copy_tile(
                q_tiles.index(1 - now), do_tiles.index(1 - now), lse_of.index(1 - now), delta_of.index(1 - now),
                q_ptr, do_ptr, stats_ptr, q_at, do_at, pair, head, n, G, DK, DV,
            )  # fmt: skip
            s = warpgroup_mma_wait(1, deps=[s])
            start = lse_of.index(now).load(gl.SliceLayout(0, mma_s))[None, :]
            s = capped(s - start if INNER != 0.0 else s, INNER)
            p = gl.exp2((s + start if INNER != 0.0 else s) * qk_scale)
            if i * QUERIES < masked:
                if where is None:
                    t = t0 + dq_at.index(i % 4).load(gl.SliceLayout(0, mma_s)) // (n * G)
                else:  # a thread looks up one row, and tells the others
                    row = gl.maximum(dq_at.index(i % 4).load(row_layout), 0)
                    low, t = keys_of_pair(row // G, where, n, SIZE)
                    low = gl.convert_layout(low, gl.SliceLayout(0, mma_s))
                    p = gl.where(key[:, None] >= low[None, :], p, 0.0)
                    t = gl.convert_layout(t, gl.SliceLayout(0, mma_s))
                p = gl.where(key[:, None] <= t[None, :], p, 0.0)
            p_low = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma_v, 2))
            dv = warpgroup_mma(p_low, do, dv, is_async=True)
            p = through_cap(p, s, INNER)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = (p * dp).to(dtype)
            ds_tile.store(ds)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, mma_k, 2))
            fence_async_shared()
            barrier()
            dq = _product(ds_tile, k_tile.slice(0, DQ, 1), mma_q)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            _place(q_at, do_at, dq_at.index((i + 2) % 4), later, head, q_sg, q_st, d_sg, d_st, n, G)
            pair = later
            later = _load_pairs(order_ptr, query + (i + 3) * QUERIES, count)
            dq, dv, p_low = warpgroup_mma_wait(1, deps=[dq, dv, p_low])
            _store_dq(dq_ptr, dq, dq_at.index(i % 4), scale, DK)
            if DQ < DK:
                dq = _product(ds_tile, k_tile.slice(DQ, DQ, 1), mma_q)
                dq, dk, ds = warpgroup_mma_wait(0, deps=[dq, dk, ds])
                _store_dq(dq_ptr + DQ, dq, dq_at.index(i % 4), scale, DK)
            else:
                dk, ds = warpgroup_mma_wait(0, deps=[dk, ds])
        async_copy.wait_group(0)

        # An only replica adds to the gradients of earlier chunks; several replicas store theirs for sum_shared.
        slot = gl.load(replicas_ptr + 3 * num_replicas)
        row = bh * num_keys + first
        if slot >= 0:
            row = (bh * num_shared + slot) * SIZE + (first - begin)
            dk_ptr = dk_shared_ptr
            dv_ptr = dv_shared_ptr
        elif HAS_POSITIONS:  # the tile of another boundary may have the keys that no query of this one sees
            _, token = keys_of_pair(gl.load(order_ptr + count - 1), where, n, SIZE)
            end = gl.minimum(end, token + 1)
        _add_or_store(dk_ptr + row * DK, dk, end - first, slot, DK)
        _add_or_store(dv_ptr + row * DV, dv, end - first, slot, DV)


@gluon_jit
def _load_pairs(order_ptr, at, count):
    """Load the pairs at these places in the list; -1 for none."""
    return gl.where(at < count, gl.load(order_ptr + gl.minimum(at, count - 1)), -1)


@gluon_jit
def _place(q_at, do_at, dq_at, pair, head, q_sg, q_st, d_sg, d_st, n: gl.constexpr, G: gl.constexpr):
    """Store where the rows of a tile are: of q and of do, in units of 16 bytes, and of dq; -1 for none."""
    t = pair // n
    q_at.store(gl.where(pair >= 0, (t * q_st + head * q_sg) >> 3, -1))
    do_at.store(gl.where(pair >= 0, (t * d_st + head * d_sg) >> 3, -1))
    dq_at.store(gl.where(pair >= 0, pair * G + head, -1))


@gluon_jit
def _copy_tile(
    q_to, do_to, lse_to, delta_to, q_ptr, do_ptr, stats_ptr, q_at, do_at, pair, head,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile of q and do, and its stats."""
    stat = stats_ptr + (pair // n * G + head) * 2
    async_load(lse_to, stat, pair >= 0)
    async_load(delta_to, stat + 1, pair >= 0)
    copy_gathered(q_to, q_ptr, q_at, DK)
    copy_gathered(do_to, do_ptr, do_at, DV)
    async_copy.commit_group()


@gluon_jit
def _product_from(a, b, start, layout: gl.constexpr):
    """Issue ``start + a b^T``, with a start for each column."""
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[0]
    zero = gl.zeros([M, N], gl.float32, layout)
    start, _ = gl.broadcast(start.load(gl.SliceLayout(0, layout))[None, :], zero)
    return warpgroup_mma(a, b.permute([1, 0]), start, is_async=True)


@gluon_jit
def _product(a, b, layout: gl.constexpr):
    """Issue ``a^T b``."""
    M: gl.constexpr = a.shape[1]
    N: gl.constexpr = b.shape[1]
    zero = gl.zeros([M, N], gl.float32, layout)
    return warpgroup_mma(a.permute([1, 0]), b, zero, use_acc=False, is_async=True)


@gluon_jit
def _store_dq(ptr, dq, dq_at, scale, DK: gl.constexpr):
    """Store columns of dq."""
    layout: gl.constexpr = store_layout(dq.shape[1])
    row = dq_at.load(gl.SliceLayout(1, layout))
    column = gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))
    dq = gl.convert_layout((dq * scale).to(ptr.dtype.element_ty), layout)
    to = ptr + (row.to(gl.int64) * DK)[:, None] + column[None, :]
    mask = (row >= 0)[:, None] & (column[None, :] < DK)
    gl.store(to, dq, mask=mask, eviction_policy="evict_first")


@gluon_jit
def _add_or_store(ptr, x, rows, slot, WIDTH: gl.constexpr):
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    to = ptr + row[:, None] * WIDTH + column[None, :]
    mask = (row < rows)[:, None] & (column[None, :] < WIDTH)
    if slot < 0:
        x += gl.load(to, mask=mask, other=0.0)
    gl.store(to, x, mask=mask)
