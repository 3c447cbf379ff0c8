# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention to an interval of keys for each query, forward; see :mod:`flexnsa.attention.triton.kernels.intervals`."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from flexnsa.attention.triton.kernels.gluon import barrier, gluon_jit
from flexnsa.attention.triton.kernels.hopper.rows import copy_rows, product_layout, product_with, store_rows
from flexnsa.attention.triton.kernels.intervals import keys_of, place
from flexnsa.attention.triton.kernels.visible import capped


@gluon_jit(do_not_specialize=["p_sb", "num_heads", "num_queries", "num_keys"])
def hopper_forward(
    q_ptr, k_ptr, v_ptr, token_ptr, start_ptr, first_ptr, p_sb, out_ptr, lse_ptr,
    q_sb, q_sh, q_st, k_sb, k_sh, k_st, v_sb, v_sh, v_st, o_sb, o_sh, o_st,
    num_heads, num_queries, num_keys, qk_scale,
    G: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr,
    WINDOW: gl.constexpr, HAS_POSITIONS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """Compute the output and the natural log-sum-exp of a query tile."""
    tile, bh = place(True, WINDOW)
    b = bh // num_heads
    h = bh % num_heads
    where = (token_ptr, start_ptr, first_ptr, (b * p_sb).to(gl.int32)) if HAS_POSITIONS else None
    out, lse = attend_to_keys(
        q_ptr + b * q_sb + h * q_sh, k_ptr + b * k_sb + (h // G) * k_sh, v_ptr + b * v_sb + (h // G) * v_sh, where,
        tile * BM, q_st, k_st, v_st, num_queries, num_keys, qk_scale, DK, DV, LENGTH, STRIDE, WINDOW, BM, BN, INNER,
    )  # fmt: skip
    row = tile * BM + gl.arange(0, BM, lse.type.layout)
    gl.store(lse_ptr + bh * num_queries + row, lse, mask=row < num_queries)
    store_rows(out_ptr + b * o_sb + h * o_sh, tile * BM, num_queries, o_st, out, DV)


@gluon_jit
def attend_to_keys(
    q_ptr, k_ptr, v_ptr, where, row0, q_st, k_st, v_st, num_queries, num_keys, qk_scale,
    DK: gl.constexpr, DV: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr, WINDOW: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """Return the output and the natural log-sum-exp of the queries from ``row0`` on. There is one at least.

    The product with the values of a tile runs beside the scores of the next one, and while their softmax is computed.
    Tiles of keys that some query does not see in whole come first, in a loop with a mask: order does not matter.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    mma_s: gl.constexpr = product_layout(BN)
    mma_o: gl.constexpr = product_layout(DV)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(dtype, [BM, DK], swizzled)
    k_tiles = gl.allocate_shared_memory(dtype, [2, BN, DK], swizzled)
    v_tiles = gl.allocate_shared_memory(dtype, [2, BN, DV], swizzled)
    hold = gl.allocate_shared_memory(gl.float32, [BM, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    # Some query sees the keys from begin to end; all see those of the tiles in the middle, which come last.
    begin, high0 = keys_of(row0, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    last = gl.minimum(row0 + BM, num_queries) - 1
    low1, end = keys_of(last, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)
    end = gl.maximum(begin, end)
    before = gl.minimum((low1 - begin + BN - 1) // BN, (end - begin + BN - 1) // BN)
    middle = gl.maximum(high0 - (begin + before * BN), 0) // BN
    rest = begin + (before + middle) * BN
    after = (gl.maximum(end - rest, 0) + BN - 1) // BN
    tiles = gl.maximum(before + middle + after, 1)  # without a key there is one tile, whose keys nobody sees
    masked = gl.minimum(gl.maximum(after + before, 1), tiles)
    # Tile i begins at ``shifted + i * BN``, but the first ``after`` ones begin at ``rest + i * BN``.
    shifted = begin - after * BN

    # The first copies are of the queries and the keys of tile 0; the next of the keys of tile i and the values of
    # tile i - 1, which iteration i needs.
    copy_rows(q_tile, q_ptr, row0, num_queries, q_st, DK)
    key_k = gl.where(after > 0, rest, shifted)  # where the last tile of keys that is copied begins
    end_k = end  # and ends: 0 without such a tile
    copy_rows(k_tiles.index(0), k_ptr, key_k, end_k, k_st, DK)
    async_copy.commit_group()
    key_v = key_k
    end_v = end_k
    key_k = gl.where(after > 1, rest, shifted) + BN
    end_k = gl.where(tiles > 1, end, 0)
    copy_rows(k_tiles.index(1), k_ptr, key_k, end_k, k_st, DK)
    copy_rows(v_tiles.index(0), v_ptr, key_v, end_v, v_st, DV)
    async_copy.commit_group()

    top = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, mma_s))
    acc = gl.zeros([BM, DV], gl.float32, mma_o)
    row = row0 + gl.arange(0, BM, gl.SliceLayout(1, mma_s))
    low, high = keys_of(row, where, num_queries, num_keys, LENGTH, STRIDE, WINDOW)

    async_copy.wait_group(1)
    barrier()
    fence_async_shared()
    s = product_with(q_tile, k_tiles.index(0), mma_s)
    s = capped(warpgroup_mma_wait(0, deps=[s]), INNER)
    s = _mask(s, low, high, gl.where(after > 0, rest, shifted))
    p, decay, top, total = _softmax(s, top, 0.0, qk_scale)

    for part in gl.static_range(2):
        for i in range(1 if part == 0 else masked, masked if part == 0 else tiles):
            # All warps have waited for the products of iteration i - 1: the places of keys i - 1 and values i - 2 are
            # free.
            async_copy.wait_group(0)
            barrier()
            fence_async_shared()
            s = product_with(q_tile, k_tiles.index(i % 2), mma_s)
            # Rounded here and not before: where an iteration hands on 16-bit numbers, it unpacks and packs them again.
            p_low = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma_o, 2))
            acc = warpgroup_mma(p_low, v_tiles.index((i - 1) % 2), acc, is_async=True)
            barrier()  # needless, but the compiler cannot tell the places apart: it would add one before each copy
            key_v = key_k
            end_v = end_k
            key_k = gl.where(i + 1 < after, rest, shifted) + (i + 1) * BN
            end_k = gl.where(i + 1 < tiles, end, 0)
            copy_rows(k_tiles.index((i + 1) % 2), k_ptr, key_k, end_k, k_st, DK)
            copy_rows(v_tiles.index(i % 2), v_ptr, key_v, end_v, v_st, DV)
            async_copy.commit_group()
            s = capped(warpgroup_mma_wait(1, deps=[s]), INNER)
            if part == 0:
                s = _mask(s, low, high, gl.where(i < after, rest, shifted) + i * BN)
            p, decay, top, total = _softmax(s, top, total, qk_scale)
            # The assembler moves a wait for products before the softmax, but not across a store of its results. Nobody
            # reads this one.
            hold.store(total)
            acc, p_low = warpgroup_mma_wait(0, deps=[acc, p_low])
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, mma_o))[:, None]

    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    p_low = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma_o, 2))
    acc = warpgroup_mma(p_low, v_tiles.index((tiles - 1) % 2), acc, is_async=True)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, mma_s))
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(some)) * 0.6931471805599453)
    acc, p_low = warpgroup_mma_wait(0, deps=[acc, p_low])
    return acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, mma_o))[:, None], lse


@gluon_jit
def _mask(s, low, high, key0):
    """Hide the scores of the keys that a query does not see."""
    N: gl.constexpr = s.shape[1]
    key = key0 + gl.arange(0, N, gl.SliceLayout(0, s.type.layout))[None, :]
    return gl.where((key >= low[:, None]) & (key < high[:, None]), s, float("-inf"))


@gluon_jit
def _softmax(s, top, total, qk_scale):
    """Return probabilities, relative to the new maximum of each row so far, and what older ones are multiplied by.

    ``total`` has 8 sums of each row, over the keys that equal one another modulo 8. A thread has all terms of its sums,
    so lanes need not exchange any before the end.
    """
    new_top = gl.maximum(top, gl.max(s, 1) * qk_scale)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: -inf - -inf would be NaN
    p = gl.exp2(s * qk_scale - shift[:, None])
    decay = gl.exp2(top - shift)
    sums = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, decay, new_top, total
