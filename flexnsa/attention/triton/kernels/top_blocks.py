# pyright: standard
"""The selected blocks of one query; see :mod:`flexnsa.attention.triton.top_blocks`."""

from __future__ import annotations

import triton.language as tl

from flexnsa.attention.triton.kernels.visible import count_visible, load_positions
from flexnsa.attention.triton.typed import jit


@jit
def choose(
    own_ptr,
    passed_ptr,
    out_ptr,
    current,
    visible,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the best of blocks ``0 .. current``, at most ``BLOCK_J`` of them, in ascending order."""
    # Blocks without a visible key were never written: their importance is zero.
    block = tl.arange(0, BLOCK_J)
    first_key = block * (BLOCK_SIZE // STRIDE)
    score = tl.load(own_ptr + block, mask=(block <= current) & (first_key + FIRST < visible), other=0.0)
    if HAS_PASSED:
        reached = first_key - (LENGTH // STRIDE - 1) < visible
        score += tl.load(passed_ptr + block - 1, mask=(block > 0) & (block <= current) & reached, other=0.0)

    forced = (block < NUM_INIT) | (block > current - NUM_LOCAL)
    rank = tl.where(forced, 2147483647, score.to(tl.int32, bitcast=True))
    rank = tl.where(block <= current, rank, -1)

    # Find the largest threshold that at least n candidates reach. With n candidates or fewer it stays 0, below all.
    threshold = 0
    bit = tl.where(current >= NUM_SELECTED, 30, -1)
    while bit >= 0:
        trial = threshold | (1 << bit)
        count = tl.sum((rank >= trial).to(tl.int32))
        threshold = tl.where(count >= NUM_SELECTED, trial, threshold)
        bit = tl.where(count == NUM_SELECTED, -1, bit - 1)

    total = tl.minimum(current + 1, NUM_SELECTED)
    above = rank > threshold
    tied = rank == threshold
    num_tied = total - tl.sum(above.to(tl.int32))
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32)) <= num_tied))
    slot = tl.cumsum(chosen.to(tl.int32)) - 1

    tl.store(out_ptr + slot, block, mask=chosen)
    padding = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + padding, -1, mask=(padding >= total) & (padding < NUM_SELECTED))


@jit(do_not_specialize=["first_row", "num_rows", "num_queries", "width"])
def top_blocks_kernel(
    own_ptr,
    passed_ptr,
    token_ptr,
    start_ptr,
    position_stride_b,
    out_ptr,
    first_row,
    num_rows,
    num_queries,
    width,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Select the blocks of one query, for one kv head, by a search no larger than its number of blocks requires."""
    local_row = tl.program_id(0) % num_rows
    head = (tl.program_id(0) // num_rows).to(tl.int64)
    row = first_row + local_row
    at = (head // KV_HEADS) * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, num_queries, HAS_POSITIONS)
    visible = count_visible(token - start, LENGTH, STRIDE)
    current = tl.minimum((token - start) // BLOCK_SIZE, width - 1)

    cell = (head * num_rows + local_row) * tl.multiple_of(width, 16)
    own, passed, out = own_ptr + cell, passed_ptr + cell, out_ptr + (head * num_queries + row) * NUM_SELECTED
    for halvings in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        many = current >= (BLOCK_J >> halvings) // 2
        if (current < BLOCK_J >> halvings) & (many | (halvings == LEVELS - 1)):
            choose(
                own, passed, out, current, visible, LENGTH, STRIDE, BLOCK_SIZE, FIRST, HAS_PASSED,
                NUM_INIT, NUM_LOCAL, NUM_SELECTED, BLOCK_J >> halvings, BLOCK_N,
            )  # fmt: skip
