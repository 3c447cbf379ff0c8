# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Log-sum-exp of a tile of queries over the compressed tokens that they see; as ``kernels/log_sum_exp.py`` does.

Each tile of keys is multiplied in two halves: the product with one runs while the exponentials of the other are summed.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flexnsa.attention.triton.gluon import barrier, gluon_jit
from flexnsa.attention.triton.kernels.hopper.interval_keys import keys_of, place
from flexnsa.attention.triton.kernels.hopper.rows import copy_rows, product_layout, product_with


@gluon_jit(do_not_specialize=["num_heads", "num_queries", "num_keys"])
def hopper_log_sum_exp(
    q_ptr, k_ptr, out_ptr, q_sb, q_sh, q_st, k_sb, k_sh, k_sn, num_heads, num_queries, num_keys, scale_log2,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one tile of queries of one head, from the last keys that it sees to the first."""
    half: gl.constexpr = BLOCK_N // 2
    mma: gl.constexpr = product_layout(half, gl.num_warps())
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BLOCK_T, HEAD_DIM], swizzled)
    first_keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [2, half, HEAD_DIM], swizzled)
    second_keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [2, half, HEAD_DIM], swizzled)
    hold = gl.allocate_shared_memory(gl.float32, [BLOCK_T, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    scales = gl.allocate_shared_memory(gl.float32, [BLOCK_T, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

    tile, batch_head = place(True, 0)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    row0 = tile * BLOCK_T
    q_ptr += batch * q_sb + head * q_sh
    k_ptr += batch * k_sb + head // GROUP * k_sh

    # Some query sees the keys before ``end``; all see those before ``shared``. Without a key there is one tile.
    _, shared = keys_of(row0, num_keys, LENGTH, STRIDE, 0)
    _, end = keys_of(gl.minimum(row0 + BLOCK_T, num_queries) - 1, num_keys, LENGTH, STRIDE, 0)
    tiles = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)
    key0 = (tiles - 1) * BLOCK_N  # where the tile of the latest product begins
    copy_rows(q_tile, q_ptr, row0, num_queries, q_st, HEAD_DIM)
    _copy(first_keys.index(0), second_keys.index(0), k_ptr, key0, end, k_sn)
    async_copy.commit_group()
    _copy(first_keys.index(1), second_keys.index(1), k_ptr, key0 - BLOCK_N, end, k_sn)
    async_copy.commit_group()

    row = row0 + gl.arange(0, BLOCK_T, gl.SliceLayout(1, mma))
    _, visible = keys_of(row, num_keys, LENGTH, STRIDE, 0)

    async_copy.wait_group(1)
    barrier()
    fence_async_shared()
    q = q_tile
    if IN_REGISTERS:
        q = q_tile.load(gl.DotOperandLayout(0, mma, 2))
    first = product_with(q, first_keys.index(0), mma)
    first = warpgroup_mma_wait(0, deps=[first])
    second = product_with(q, second_keys.index(0), mma)
    top, total = _begin(_mask(first, visible, key0), scale_log2)
    second = warpgroup_mma_wait(0, deps=[second])
    # Exponentials of the loops need a number from shared memory, or the assembler would put them before the products.
    scales.store(gl.full([BLOCK_T, 4], scale_log2, gl.float32, top.type.layout))

    # The second half of each tile is summed in the next iteration, and that of the last tile after the loops. The first
    # loop has masks.
    whole = shared // BLOCK_N
    masked = gl.minimum(tiles - whole + 1, tiles)
    for part in gl.static_range(2):
        for i in range(1 if part == 0 else masked, masked if part == 0 else tiles):
            async_copy.wait_group(0)
            barrier()
            fence_async_shared()
            first = product_with(q, first_keys.index(i % 2), mma)
            # All warps have waited for the products of iteration i - 1: the place of its keys is free. The barrier is
            # needless, but the compiler would add one before each copy.
            barrier()
            _copy(first_keys.index((i + 1) % 2), second_keys.index((i + 1) % 2), k_ptr, key0 - 2 * BLOCK_N, end, k_sn)
            async_copy.commit_group()
            if part == 0:
                second = _mask(second, visible, key0 + half)
            key0 -= BLOCK_N
            top, total = _add(top, total, second, scales.load(top.type.layout))
            # The assembler moves a wait for products before the sums, but not across a store. Nobody reads this one.
            hold.store(total)
            first = warpgroup_mma_wait(0, deps=[first])
            second = product_with(q, second_keys.index(i % 2), mma)
            if part == 0:
                first = _mask(first, visible, key0)
            top, total = _add(top, total, first, scales.load(top.type.layout))
            hold.store(total)
            second = warpgroup_mma_wait(0, deps=[second])
    async_copy.wait_group(0)
    top, total = _add(top, total, _mask(second, visible, key0 + half), scales.load(top.type.layout))

    largest = gl.max(top, 1)
    total = gl.sum(total * gl.exp2(top - _shift(largest)[:, None]), 1)
    some = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), (largest + gl.log2(some)) * 0.6931471805599453)
    gl.store(out_ptr + batch_head * num_queries + row, gl.convert_layout(lse, row.type.layout), mask=row < num_queries)


@gluon_jit
def _copy(first_half, second_half, ptr, first, end, stride):
    """Begin to copy the two halves of a tile of keys; no rows where it would begin before the first key."""
    half: gl.constexpr = first_half.shape[0]
    end = gl.where(first < 0, 0, end)
    first = gl.maximum(first, 0)
    copy_rows(first_half, ptr, first, end, stride, first_half.shape[1])
    copy_rows(second_half, ptr, first + half, end, stride, first_half.shape[1])


@gluon_jit
def _mask(s, visible, key0):
    """Hide the scores of the keys that a query does not see."""
    key = key0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(key[None, :] < visible[:, None], s, float("-inf"))


@gluon_jit
def _shift(top):
    """Return what to subtract from scores: 0 where there is no key yet, since -inf - -inf would be NaN."""
    return gl.where(top == float("-inf"), 0.0, top)


@gluon_jit
def _parts(s):
    """Reshape scores to the keys of each of the four lanes that share a row: ``(T, N / 8, 4, 2)``."""
    return s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])


@gluon_jit
def _begin(s, scale_log2):
    """Return the maxima of the first scores, four of each row, and the sums of their exponentials.

    A thread has all keys of its maximum and its sum, so lanes need not exchange any before the end.
    """
    x = _parts(s)
    top = gl.max(gl.max(x, 3), 1) * scale_log2
    shift = _shift(top)[:, None, :, None]
    return top, gl.sum(gl.sum(gl.exp2(x * scale_log2 - shift), 3), 1)


@gluon_jit
def _add(top, total, s, scale):
    """Return the maxima and sums so far."""
    x = _parts(s)
    new_top = gl.maximum(top, gl.max(gl.max(x, 3), 1) * scale)
    shift = _shift(new_top)
    p = gl.exp2(x * scale[:, None, :, None] - shift[:, None, :, None])
    return new_top, total * gl.exp2(top - shift) + gl.sum(gl.sum(p, 3), 1)
