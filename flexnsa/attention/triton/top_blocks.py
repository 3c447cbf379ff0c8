"""The ``n`` blocks of highest importance, by a search for the n-th largest value (NSA paper, Eq. 11).

One program selects for one query. It keeps the query's ``M`` scores in registers and builds the bits of the n-th
largest one from the top down, since non-negative floats order like their bits: a bit costs one comparison and one sum
over ``M``, and the search ends when exactly ``n`` are left. Nothing is sorted; a cumulative sum puts the ``n`` indices
in ascending order. Each score is read once, the least that any method must do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexnsa.attention.triton.importance import Scores
from flexnsa.attention.triton.visible import count_visible
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions

MAX_BLOCKS = 1 << 17
"""Blocks of one sequence whose scores fit one program (8.4 million tokens in blocks of 64)."""


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_queries", "width"])
def top_blocks_kernel(
    own_ptr,
    passed_ptr,
    token_ptr,
    start_ptr,
    out_ptr,
    position_stride_b,
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
    NUM_INIT: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    NUM_SELECTED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Select the blocks of one query, for one kv head."""
    local_row = tl.program_id(0) % num_rows
    head = (tl.program_id(0) // num_rows).to(tl.int64)
    row = first_row + local_row
    position = (head // KV_HEADS) * position_stride_b + row
    visible = count_visible(token_ptr + position, start_ptr + position, LENGTH, STRIDE)
    current = (tl.load(token_ptr + position) - tl.load(start_ptr + position)) // BLOCK_SIZE
    current = tl.minimum(current, width - 1)

    # Blocks without a visible key were never written: their importance is zero.
    block = tl.arange(0, BLOCK_J)
    first_key = block * (BLOCK_SIZE // STRIDE)
    cell = (head * num_rows + local_row) * tl.multiple_of(width, 16) + block
    score = tl.load(own_ptr + cell, mask=(block <= current) & (first_key + FIRST < visible), other=0.0)
    if HAS_PASSED:
        reached = first_key - (LENGTH // STRIDE - 1) < visible
        score += tl.load(passed_ptr + cell - 1, mask=(block > 0) & (block <= current) & reached, other=0.0)

    forced = (block < NUM_INIT) | (block > current - NUM_LOCAL)
    rank = tl.where(forced, 2147483647, score.to(tl.int32, bitcast=True))
    rank = tl.where(block <= current, rank, -1)

    # The largest threshold that at least n candidates reach; with n candidates or fewer it stays at zero, below all.
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

    out = out_ptr + (head * num_queries + row) * NUM_SELECTED
    tl.store(out + slot, block, mask=chosen)
    padding = tl.arange(0, BLOCK_N)
    tl.store(out + padding, -1, mask=(padding >= total) & (padding < NUM_SELECTED))


def check_width(width: int) -> None:
    """Refuse sequences whose scores do not fit one program.

    Raises:
        ValueError: more than ``MAX_BLOCKS`` blocks.
    """
    if width > MAX_BLOCKS:
        raise ValueError(f"q: expected at most {MAX_BLOCKS} selection blocks of select_block_size tokens, got {width}")


def write_top_blocks(
    scores: Scores,
    positions: Positions,
    out: Tensor,
    first_row: int,
    *,
    config: NSAConfig,
    num_warps: int | None = None,
) -> None:
    """Write the selected blocks of the queries ``first_row ..`` into ``out``.

    Args:
        scores: importance of the blocks for ``scores.num_rows`` queries.
        positions: where all the queries stand.
        out: block_indices, int32 ``(B, Hkv, T, n)``, contiguous.
        first_row: the query that ``scores`` starts with.
        config: the sizes.
        num_warps: warps of one program; by default such that a thread holds at most 32 scores.
    """
    batch, kv_heads, num_queries, num_selected = out.shape
    block_j = triton.next_power_of_2(scores.width)
    launch: Any = top_blocks_kernel[(batch * kv_heads * scores.num_rows,)]
    launch(
        scores.own,
        scores.passed,
        positions.token,
        positions.start,
        out,
        positions.token.stride(0) if positions.token.shape[0] > 1 else 0,
        first_row,
        scores.num_rows,
        num_queries,
        scores.width,
        KV_HEADS=kv_heads,
        LENGTH=config.compress_block_size,
        STRIDE=config.compress_stride,
        BLOCK_SIZE=config.select_block_size,
        FIRST=scores.band.first,
        HAS_PASSED=any(scores.band.passed),
        NUM_INIT=config.num_init_blocks,
        NUM_LOCAL=config.num_local_blocks,
        NUM_SELECTED=num_selected,
        BLOCK_J=block_j,
        BLOCK_N=triton.next_power_of_2(num_selected),
        num_warps=num_warps or min(max(block_j // 1024, 1), 32),
    )
