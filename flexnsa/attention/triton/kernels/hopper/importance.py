# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Importance of a tile of blocks for a tile of queries; see :mod:`flexnsa.attention.triton.kernels.importance`.

The keys of a tile stay in shared memory, in pieces: those at the first places in their blocks, those at the next ones,
and so on. The product of a head's queries with one piece runs while the probabilities of the one before are summed.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from flexnsa.attention.triton.kernels.gluon import async_load, barrier, gluon_jit
from flexnsa.attention.triton.kernels.hopper.rows import copy_layout, copy_rows, product_layout, product_with
from flexnsa.attention.triton.kernels.visible import capped, count_visible, place_in_scores


@gluon_jit(do_not_specialize=["first_row", "num_rows", "num_keys", "width"])
def hopper_importance(
    q_ptr, k_ptr, lse_ptr, own_ptr, passed_ptr, q_sb, q_sh, q_st, k_sb, k_sh, k_sn, lse_sb, lse_sh,
    first_row, num_rows, num_keys, width, scale_log2,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr,
    RATIO: gl.constexpr, OWN: gl.constexpr, PASSED: gl.constexpr, HAS_PASSED: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_J: gl.constexpr, PLACES: gl.constexpr, INNER: gl.constexpr,
):  # fmt: skip
    """Score one tile of queries against one tile of blocks of one kv head, with ``PLACES`` keys of each in a piece."""
    pieces: gl.constexpr = RATIO // PLACES
    mma: gl.constexpr = product_layout(PLACES * BLOCK_J, gl.num_warps())
    cells: gl.constexpr = product_layout(BLOCK_J, gl.num_warps())
    of_rows: gl.constexpr = gl.SliceLayout(1, cells)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    local_row0, first_block, batch_head = place_in_scores(num_rows, width, BLOCK_T, BLOCK_J)
    batch = batch_head // KV_HEADS
    kv_head = batch_head % KV_HEADS
    row0 = first_row + local_row0
    end = first_row + num_rows

    if first_block * RATIO < count_visible(gl.minimum(row0 + BLOCK_T, end) - 1, LENGTH, STRIDE):
        k_tiles = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [pieces, PLACES * BLOCK_J, HEAD_DIM], swizzled)
        q_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, BLOCK_T, HEAD_DIM], swizzled)
        lse_tiles = gl.allocate_shared_memory(gl.float32, [4, BLOCK_T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        hold = gl.allocate_shared_memory(gl.float32, [BLOCK_T, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        k_ptr += batch * k_sb + kv_head * k_sh
        q_ptr += batch * q_sb + kv_head * GROUP * q_sh
        lse_ptr += batch * lse_sb + kv_head * GROUP * lse_sh
        for piece in gl.static_range(pieces):
            _copy_keys(
                k_tiles.index(piece), k_ptr, first_block, piece * PLACES, num_keys, k_sn, RATIO, BLOCK_J, HEAD_DIM
            )
        copy_rows(q_tiles.index(0), q_ptr, row0, end, q_st, HEAD_DIM)
        _copy_lse(lse_tiles.index(0), lse_ptr, row0, end)
        async_copy.commit_group()
        q_ptr += q_sh
        lse_ptr += lse_sh
        copy_rows(q_tiles.index(1), q_ptr, row0, end if GROUP > 1 else 0, q_st, HEAD_DIM)
        _copy_lse(lse_tiles.index(1), lse_ptr, row0, end if GROUP > 1 else 0)
        async_copy.commit_group()

        local_row = local_row0 + gl.arange(0, BLOCK_T, of_rows)
        visible = count_visible(first_row + local_row, LENGTH, STRIDE)
        block = first_block + gl.arange(0, BLOCK_J, gl.SliceLayout(0, cells))
        visible = visible[:, None] - (block * RATIO)[None, :]
        own = gl.zeros([BLOCK_T, BLOCK_J], gl.float32, cells)
        passed = gl.zeros([BLOCK_T, BLOCK_J], gl.float32, cells)

        async_copy.wait_group(1)
        barrier()
        fence_async_shared()
        q = q_tiles.index(0)
        scores = product_with(q, k_tiles.index(0), mma)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for piece in gl.static_range(1, pieces):
            ahead = product_with(q, k_tiles.index(piece), mma)
            own, passed = _add(
                own, passed, scores, lse_tiles.index(0), visible, scale_log2, piece - 1, PLACES, OWN, PASSED,
                INNER, True,
            )  # fmt: skip
            _hold(hold, own)
            scores = warpgroup_mma_wait(0, deps=[ahead])

        # One of the two loops runs, over the heads but the first; the last product of each head is summed in the next
        # iteration, and that of the last head after the loops.
        whole = count_visible(row0, LENGTH, STRIDE) >= (first_block + BLOCK_J) * RATIO
        num_masked = gl.where(whole, 0, GROUP - 1)
        for part in gl.static_range(2):
            for i in range(0 if part == 0 else num_masked, num_masked if part == 0 else GROUP - 1):
                async_copy.wait_group(0)
                barrier()
                fence_async_shared()
                q = q_tiles.index((i + 1) % 2)
                for piece in gl.static_range(pieces):
                    ahead = product_with(q, k_tiles.index(piece), mma)
                    # The compiler would add a barrier anyway. lse is read after this one, so no exponential is computed
                    # before the product is issued.
                    barrier()
                    if piece == 0:
                        # All warps have waited for the products of head i: the place of its queries is free.
                        q_ptr += q_sh
                        lse_ptr += lse_sh
                        copied = gl.where(i + 2 < GROUP, end, 0)
                        copy_rows(q_tiles.index(i % 2), q_ptr, row0, copied, q_st, HEAD_DIM)
                        _copy_lse(lse_tiles.index((i + 2) % 4), lse_ptr, row0, copied)
                        async_copy.commit_group()
                    lse = lse_tiles.index((i if piece == 0 else i + 1) % 4)
                    own, passed = _add(
                        own, passed, scores, lse, visible, scale_log2, (piece + pieces - 1) % pieces, PLACES, OWN,
                        PASSED, INNER, part == 0,
                    )  # fmt: skip
                    _hold(hold, own)
                    scores = warpgroup_mma_wait(0, deps=[ahead])
        async_copy.wait_group(0)
        own, passed = _add(
            own, passed, scores, lse_tiles.index((GROUP - 1) % 4), visible, scale_log2, pieces - 1, PLACES, OWN, PASSED,
            INNER, True,
        )  # fmt: skip

        cell = ((batch_head * num_rows + local_row) * width)[:, None] + block[None, :]
        stored = (local_row < num_rows)[:, None] & (block < width)[None, :]
        gl.store(own_ptr + cell, own, mask=stored)
        if HAS_PASSED:
            gl.store(passed_ptr + cell, passed, mask=stored)


@gluon_jit
def _copy_keys(
    to, k_ptr, first_block, offset, num_keys, k_sn, RATIO: gl.constexpr, BLOCK_J: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Begin to copy the keys at the place ``offset`` of each block, then those at the next ones."""
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    number = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))
    key = (first_block + number % BLOCK_J) * RATIO + offset + number // BLOCK_J
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (key < num_keys)[:, None] & (column < WIDTH)[None, :]
    async_load(to, k_ptr + (key.to(gl.int64) * k_sn)[:, None] + column[None, :], mask)


@gluon_jit
def _copy_lse(to, ptr, first, end):
    """Begin to copy the log-sum-exps of a tile of queries; zeros from ``end`` on."""
    row = gl.arange(0, to.shape[0], gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) % to.shape[0]
    async_load(to, ptr + first + row, first + row < end)


@gluon_jit
def _hold(hold, own):
    """Store what nobody reads: across a store the assembler does not move the wait that follows, to before the sums."""
    hold.store(gl.sum(own.reshape([own.shape[0], own.shape[1] // 8, 8]), 1))


@gluon_jit
def _add(
    own, passed, scores, lse, visible, scale_log2, PIECE: gl.constexpr, PLACES: gl.constexpr, OWN: gl.constexpr,
    PASSED: gl.constexpr, INNER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the probabilities of the keys of a piece, in the order of their places in the blocks."""
    layout: gl.constexpr = own.type.layout
    T: gl.constexpr = own.shape[0]
    J: gl.constexpr = own.shape[1]
    shift = lse.load(gl.SliceLayout(1, layout)) * -1.4426950408889634
    of_places = _split(scores, PLACES)
    for n in gl.static_range(PLACES):
        score = capped(gl.convert_layout(of_places[n], layout, assert_trivial=True), INNER)
        p = gl.exp2(gl.fma(score, gl.full([T, J], scale_log2, gl.float32, layout), shift[:, None]))
        if MASKED:
            p = gl.where(visible > PIECE * PLACES + n, p, 0.0)
        # Explicit fma: with and without masks must round equally, or equal scores would not tie.
        own = gl.fma(p, gl.full([T, J], OWN[PIECE * PLACES + n], gl.float32, layout), own)
        if PASSED[PIECE * PLACES + n] > 0:
            passed = gl.fma(p, gl.full([T, J], PASSED[PIECE * PLACES + n], gl.float32, layout), passed)
    return own, passed


@gluon_jit
def _split(x, PARTS: gl.constexpr):
    """Return the parts of each row, a power of 2 of them."""
    if PARTS == 1:
        parts = (x,)
    else:
        first, second = gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))
        parts = _split(first, PARTS // 2) + _split(second, PARTS // 2)
    return parts
