# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention to an interval of keys that begins at the first one, forward, with warps of their own for copies.

Four warps copy keys and values for two groups of four, which have 64 queries each and do not wait for one another: the
softmax of one runs beside products of the other. See :mod:`flexnsa.attention.triton.kernels.hopper.intervals_forward`.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexnsa.attention.triton.gluon import barrier, gluon_jit
from flexnsa.attention.triton.kernels.hopper.interval_keys import keys_of, place
from flexnsa.attention.triton.kernels.hopper.intervals_forward import as_operand, mask_scores, pack, softmax
from flexnsa.attention.triton.kernels.hopper.rows import copy_rows, product_layout, product_with, store_rows


@gluon_jit(do_not_specialize=["num_heads", "num_queries", "num_keys"])
def hopper_forward_apart(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
    num_heads, num_queries, num_keys, qk_scale,
    G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr,
    WINDOW: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Compute the output and the natural log-sum-exp of two tiles of 64 queries; ``num_warps`` is 4."""
    gl.static_assert(BM == 128 and WINDOW == 0)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, DK], swizzled)
    k_tiles = gl.allocate_shared_memory(dtype, [2, BN, DK], swizzled)
    v_tiles = gl.allocate_shared_memory(dtype, [2, BN, DV], swizzled)
    holds = gl.allocate_shared_memory(gl.float32, [2, 64, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # Places of keys that are full and free, and likewise of values; both groups free a place.
    events = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(8):
        mbarrier.init(events.index(i), count=1 if i % 4 < 2 else 2)

    tile, bh = place(True, WINDOW)
    b = bh // num_heads
    h = bh % num_heads
    row0 = tile * BM
    q_ptr += b * q_sb + h * q_sh
    k_ptr += b * k_sb + (h // G) * k_sh
    v_ptr += b * v_sb + (h // G) * v_sh
    out_ptr += b * o_sb + h * o_sh
    lse_ptr += bh * num_queries
    for group in gl.static_range(2):
        copy_rows(q_tiles.index(group), q_ptr, row0 + 64 * group, num_queries, q_st, DK)
    async_copy.commit_group()

    # Tiles of keys that some query does not see in whole come first.
    _, high0 = keys_of(row0, num_keys, LENGTH, STRIDE, WINDOW)
    _, end = keys_of(gl.minimum(row0 + BM, num_queries) - 1, num_keys, LENGTH, STRIDE, WINDOW)
    rest = high0 // BN * BN
    after = (end - rest + BN - 1) // BN
    tiles = gl.maximum(high0 // BN + after, 1)  # without a key there is one tile, whose keys nobody sees
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_attend, (q_tiles, k_tiles, v_tiles, holds, events, out_ptr, o_st, lse_ptr, row0, num_queries, num_keys,
                       rest, after, tiles, qk_scale, LENGTH, STRIDE, DV, 0)),
            (_attend, (q_tiles, k_tiles, v_tiles, holds, events, out_ptr, o_st, lse_ptr, row0, num_queries, num_keys,
                       rest, after, tiles, qk_scale, LENGTH, STRIDE, DV, 1)),
            (_copy, (k_tiles, v_tiles, events, k_ptr, k_st, v_ptr, v_st, rest, after, end, tiles, DK, DV)),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip


@gluon_jit
def _copy(
    k_tiles, v_tiles, events, k_ptr, k_st, v_ptr, v_st, rest, after, end, tiles, DK: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """Copy keys and values, each to the place of the second tile before."""
    BN: gl.constexpr = k_tiles.shape[1]
    for i in range(tiles):
        slot = i % 2
        free = (i // 2 + 1) % 2
        key = gl.where(i < after, rest, -after * BN) + i * BN
        mbarrier.wait(events.index(2 + slot), free)
        copy_rows(k_tiles.index(slot), k_ptr, key, end, k_st, DK, True)
        async_copy.commit_group()
        if i > 0:
            async_copy.wait_group(1)
            _tell(events.index(5 - slot))
        async_copy.wait_group(0)
        _tell(events.index(slot))
        # Last, as these values are needed an iteration later, and their place is free as much later.
        mbarrier.wait(events.index(6 + slot), free)
        copy_rows(v_tiles.index(slot), v_ptr, key, end, v_st, DV, True)
        async_copy.commit_group()
    async_copy.wait_group(0)
    _tell(events.index(4 + (tiles - 1) % 2))


@gluon_jit
def _tell(event):
    """Tell the other groups what all threads of this one have copied."""
    fence_async_shared()
    barrier()
    mbarrier.arrive(event)


@gluon_jit
def _attend(
    q_tiles, k_tiles, v_tiles, holds, events, out_ptr, o_st, lse_ptr, row0, num_queries, num_keys, rest, after, tiles,
    qk_scale, LENGTH: gl.constexpr, STRIDE: gl.constexpr, DV: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attend from the queries of one group of warps."""
    BN: gl.constexpr = k_tiles.shape[1]
    dtype: gl.constexpr = q_tiles.dtype
    mma_s: gl.constexpr = product_layout(BN)
    mma_o: gl.constexpr = product_layout(DV)
    q_tile = q_tiles.index(GROUP)
    hold = holds.index(GROUP)
    first = row0 + 64 * GROUP
    row = first + gl.arange(0, 64, gl.SliceLayout(1, mma_s))
    low, high = keys_of(row, num_keys, LENGTH, STRIDE, 0)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, mma_s))
    acc = gl.zeros([64, DV], gl.float32, mma_o)

    mbarrier.wait(events.index(0), 0)
    s = product_with(q_tile, k_tiles.index(0), mma_s)
    s = warpgroup_mma_wait(0, deps=[s])
    barrier()
    mbarrier.arrive(events.index(2))
    s = mask_scores(s, low, high, gl.where(after > 0, rest, 0))
    p, decay, top, total = softmax(s, top, 0.0, qk_scale)
    p = pack(p, dtype)
    masked = gl.minimum(gl.maximum(after, 1), tiles)
    for part in gl.static_range(2):
        for i in range(1 if part == 0 else masked, masked if part == 0 else tiles):
            mbarrier.wait(events.index(i % 2), i // 2 % 2)
            s = product_with(q_tile, k_tiles.index(i % 2), mma_s)
            p_low = as_operand(p, dtype, mma_o)
            mbarrier.wait(events.index(4 + (i - 1) % 2), (i - 1) // 2 % 2)
            acc = warpgroup_mma(p_low, v_tiles.index((i - 1) % 2), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            barrier()
            mbarrier.arrive(events.index(2 + i % 2))
            if part == 0:
                s = mask_scores(s, low, high, gl.where(i < after, rest, -after * BN) + i * BN)
            p, decay, top, total = softmax(s, top, total, qk_scale)
            p = pack(p, dtype)
            hold.store(total)  # keeps the wait after the softmax, as in the other kernel
            acc, p_low = warpgroup_mma_wait(0, deps=[acc, p_low])
            barrier()
            mbarrier.arrive(events.index(6 + (i - 1) % 2))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, mma_o))[:, None]

    p_low = as_operand(p, dtype, mma_o)
    mbarrier.wait(events.index(4 + (tiles - 1) % 2), (tiles - 1) // 2 % 2)
    acc = warpgroup_mma(p_low, v_tiles.index((tiles - 1) % 2), acc, is_async=True)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, mma_s))
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(some)) * 0.6931471805599453)
    gl.store(lse_ptr + row, lse, mask=row < num_queries)
    acc, p_low = warpgroup_mma_wait(0, deps=[acc, p_low])
    acc = acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, mma_o))[:, None]
    store_rows(out_ptr, first, num_queries, o_st, acc, DV)
