# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Selected attention, forward; see :mod:`flexnsa.attention.triton.kernels.selected_fwd`.

The rows of a tile are consecutive in the list of all (query, head) rows of the replica, heads first. S of the next tile
is issued while the product with the values of this one runs, and is done when its output is stored.

A thread looks up one row and tells the threads of its warp: a warp copies, and later stores, the rows whose products
it computes. The columns of V are permuted so that the numbers of an output which a thread holds are adjacent.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flexnsa.attention.triton.kernels.gluon import async_load, gluon_constant, gluon_jit
from flexnsa.attention.triton.kernels.hopper.rows import (
    copy_rows,
    load_rows,
    product_layout,
    product_with,
    store_layout,
    swap_columns,
)
from flexnsa.attention.triton.kernels.selected_pairs import count_masked, first_key, keys_of_pair
from flexnsa.attention.triton.kernels.visible import capped


@gluon_jit(
    do_not_specialize=["p_sb", "kv_heads", "num_queries", "num_keys", "chunk", "index", "num_chunks", "num_replicas"]
)
def hopper_forward_parts(
    q_ptr, k_ptr, v_ptr, idx_ptr, token_ptr, start_ptr, p_sb, order_ptr, replicas_ptr, po_ptr, pl_ptr,
    q_sb, q_sh, q_sg, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st,
    kv_heads, num_queries, num_keys, chunk, index, num_chunks, num_replicas, qk_scale,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, SIZE: gl.constexpr,
    HAS_POSITIONS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr, PIECE: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Attend from some queries of a replica to its keys only: the normalised output and the base-2 log-sum-exp.

    A program has ``PIECE`` queries, of the ``PIECES`` times as many that the longest replica has.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma_s: gl.constexpr = product_layout(BN)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bh = gl.program_id(1).to(gl.int64)
    replicas_ptr += (bh * num_chunks + index) * 5 * num_replicas + gl.program_id(0) // PIECES
    before = gl.program_id(0) % PIECES * PIECE
    count = gl.minimum(gl.load(replicas_ptr + num_replicas) - before, PIECE)
    if count > 0:
        b = bh // kv_heads
        h = bh % kv_heads
        t0 = chunk * index
        q_ptr += b * q_sb + h * q_sh + t0.to(gl.int64) * q_st
        order_ptr += (bh * num_queries + t0) * n + gl.load(replicas_ptr + 2 * num_replicas) + before
        parts = bh * gl.minimum(chunk, num_queries) * n * G
        po_ptr += parts * DV
        pl_ptr += parts
        where = None
        if HAS_POSITIONS:
            where = idx_ptr + (bh * num_queries + t0) * n, token_ptr, start_ptr, (b * p_sb + t0).to(gl.int32)
        begin = first_key(gl.load(replicas_ptr), gl.load(order_ptr), where, n, SIZE)
        first = gl.maximum(begin, 0) if HAS_POSITIONS else begin
        end = gl.minimum(begin + SIZE, num_keys)
        q_tiles = gl.allocate_shared_memory(dtype, [2, BM, DK], swizzled)
        k_tile = gl.allocate_shared_memory(dtype, [BN, DK], swizzled)

        r = gl.arange(0, BM, _row_layout())
        last = count * G - 1
        tiles = last // BM + 1
        pair, head = _find(order_ptr, r, last, G)
        copy_rows(k_tile, k_ptr + b * k_sb + h * k_sh, first, end, k_st, DK)
        v_tile = load_rows(v_ptr + b * v_sb + h * v_sh, first, end, v_st, DV, True)
        _copy_queries(q_tiles.index(0), q_ptr, pair, head, q_sg, q_st, n, DK)
        async_copy.commit_group()
        row = gl.where(r <= last, pair * G + head, -1)
        pair, head = _find(order_ptr, r + BM, last, G)
        fence_async_shared()

        # So many queries, first in the list, may not see the whole block: those before its last key.
        masked = gl.minimum(gl.maximum(count_masked(begin, order_ptr, where, t0, n, SIZE), 0), count)
        masked = (gl.where(end < first + BN, count, masked) * G + BM - 1) // BM
        key = first + gl.arange(0, BN, gl.SliceLayout(0, mma_s))
        key = gl.where(key < end, key, 2147483647)

        s, next_row, pair, head = _scores(
            0, q_tiles, k_tile, q_ptr, order_ptr, pair, head, r, tiles, last, q_sg, q_st, n, G, DK, BM, mma_s
        )
        s = warpgroup_mma_wait(0, deps=[s])
        for part in gl.static_range(2):
            for i in range(0 if part == 0 else masked, masked if part == 0 else tiles):
                s, row, next_row, pair, head = _tile(
                    i, s, row, next_row, pair, head, q_tiles, k_tile, v_tile, q_ptr, order_ptr, po_ptr, pl_ptr,
                    r, key, tiles, last, q_sg, q_st, t0, where, qk_scale, part == 0, n, G, DK, DV, SIZE, BM, INNER,
                    mma_s,
                )  # fmt: skip
        async_copy.wait_group(0)


@gluon_jit
def _tile(
    i, s, row, next_row, pair, head, q_tiles, k_tile, v_tile, q_ptr, order_ptr, po_ptr, pl_ptr,
    r, key, tiles, last, q_sg, q_st, t0, where, qk_scale, MASKED: gl.constexpr, n: gl.constexpr, G: gl.constexpr,
    DK: gl.constexpr, DV: gl.constexpr, SIZE: gl.constexpr, BM: gl.constexpr, INNER: gl.constexpr, mma_s: gl.constexpr,
):  # fmt: skip
    """Compute tile ``i``, whose S is there; return what the next tile needs. After the last tile S is useless.

    ``row`` are its rows of partial results, ``next_row`` those of tile i + 1; ``pair`` and ``head`` are of tile i + 2.
    """
    mma_o: gl.constexpr = product_layout(DV)
    of_s: gl.constexpr = gl.SliceLayout(1, mma_s)
    of_o: gl.constexpr = gl.SliceLayout(1, mma_o)
    s = capped(s, INNER)
    if MASKED:
        if where is None:
            t = t0 + gl.convert_layout(row, of_s) // (n * G)
        else:
            low, t = keys_of_pair(gl.maximum(row, 0) // G, where, n, SIZE)
            t = gl.convert_layout(t, of_s)
            s = gl.where(key[None, :] >= gl.convert_layout(low, of_s)[:, None], s, float("-inf"))
        s = gl.where(key[None, :] <= t[:, None], s, float("-inf"))
    top = gl.maximum(gl.max(s, 1) * qk_scale, -3.4e38)  # finite also where all scores are -inf
    p = gl.exp2(s * qk_scale - top[:, None])
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(v_tile.dtype), gl.DotOperandLayout(0, mma_o, 2))
    zero = gl.zeros([BM, DV], gl.float32, mma_o)
    o = warpgroup_mma(p, v_tile, zero, use_acc=False, is_async=True)
    s, after, pair, head = _scores(
        i + 1, q_tiles, k_tile, q_ptr, order_ptr, pair, head, r, tiles, last, q_sg, q_st, n, G, DK, BM, mma_s
    )
    o, p = warpgroup_mma_wait(1, deps=[o, p])
    row = gl.convert_layout(row, of_o)
    lse = gl.convert_layout(top + _log2(total), of_o)
    gl.store(pl_ptr + row, lse, mask=row >= 0)
    o *= _inverse(gl.maximum(gl.convert_layout(total, of_o), 1e-30))[:, None]
    _store_outputs(po_ptr, o, row, DV)
    s = warpgroup_mma_wait(0, deps=[s])
    return s, next_row, after, pair, head


@gluon_jit
def _scores(
    i, q_tiles, k_tile, q_ptr, order_ptr, pair, head, r, tiles, last, q_sg, q_st,
    n: gl.constexpr, G: gl.constexpr, DK: gl.constexpr, BM: gl.constexpr, mma_s: gl.constexpr,
):  # fmt: skip
    """Issue S of tile ``i``, and begin to copy the queries of the next tile, whose pairs and heads these are.

    Return S, the rows of partial results of the next tile, -1 for none, and pairs and heads of the one after it. All
    warps have waited for S of tile i - 1 when they pass the barrier that ``wait_group`` adds: its buffer is free.
    """
    async_copy.wait_group(0)
    fence_async_shared()
    s = product_with(q_tiles.index(i % 2), k_tile, mma_s)
    if i + 1 < tiles:
        _copy_queries(q_tiles.index((i + 1) % 2), q_ptr, pair, head, q_sg, q_st, n, DK)
    async_copy.commit_group()
    row = gl.where((i + 1) * BM + r <= last, pair * G + head, -1)
    pair, head = _find(order_ptr, (i + 2) * BM + r, last, G)
    return s, row, pair, head


@gluon_jit
def _find(order_ptr, at, last, G: gl.constexpr):
    """Return pair and head of the rows at these places in the list of rows; those past the end are the last one."""
    at = gl.minimum(at, last).to(gl.uint32)
    query = at // G
    return gl.load(order_ptr + query), (at - query * G).to(gl.int32)


@gluon_jit
def _copy_queries(to, q_ptr, pair, head, q_sg, q_st, n: gl.constexpr, WIDTH: gl.constexpr):
    """Begin to copy the rows of q of a tile, 16 bytes at a time."""
    layout: gl.constexpr = _queries_layout(WIDTH)
    vectors = ((pair.to(gl.uint32) // n).to(gl.int32) * q_st + head * q_sg) >> 3
    vectors = gl.convert_layout(vectors, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    async_load(to, (q_ptr + column)[None, :] + (vectors.to(gl.int64) * 8)[:, None])


@gluon_jit
def _store_outputs(ptr, o, row, WIDTH: gl.constexpr):
    """Store partial outputs, whose columns are permuted as those of the values; queries stay in the cache."""
    layout: gl.constexpr = store_layout(WIDTH)
    o = gl.convert_layout(swap_columns(o.to(ptr.dtype.element_ty), WIDTH), layout)
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    to = (ptr + gl.arange(0, WIDTH, gl.SliceLayout(0, layout)))[None, :] + (row.to(gl.int64) * WIDTH)[:, None]
    gl.store(to, o, mask=(row >= 0)[:, None], eviction_policy="evict_first")


@gluon_jit
def _log2(x):
    """Return the logarithm as the unit for special functions has it; ``gl.log2`` takes 20 instructions."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon_jit
def _inverse(x):
    """Likewise return ``1 / x``."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon_constant
def _row_layout():
    """Return the layout in which a thread has one row, of those whose products its warp computes."""
    return gl.DistributedLinearLayout([], [[1], [2], [4], [8], [0]], [[16], [32]], [], [64])


@gluon_constant
def _queries_layout(columns):
    """Return the layout in which a warp copies the rows whose products it computes, 16 bytes of a thread."""
    registers, lanes = [[0, 1], [0, 2], [0, 4]], []
    column, row = 8, 1
    while column < columns:
        lanes.append([0, column])
        column *= 2
    while row < 16:
        (lanes if len(lanes) < 5 else registers).append([row, 0])
        row *= 2
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])
