# pyright: standard
"""The ``n`` blocks of highest importance, by a search for the n-th largest value (NSA paper, Eq. 11).

One program selects for one query. It keeps the query's ``M`` scores in registers and finds the bits of the n-th largest
one from the highest down, since non-negative floats order like their bits, and negative ones once all bits but the
sign are flipped. A bit costs one comparison and one sum over ``M``, and the search ends when exactly ``n`` are left.
Nothing is sorted; a cumulative sum yields the ``n`` indices in ascending order. Each score is read only once.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from flexnsa.attention.tiles.device import padded
from flexnsa.attention.triton.arguments import position_arguments
from flexnsa.attention.triton.kernels.importance import Scores
from flexnsa.attention.triton.kernels.kernel import jit
from flexnsa.attention.triton.kernels.visible import count_visible, load_positions
from flexnsa.config import NSAConfig
from flexnsa.masks.positions import Positions, tensors_of

MAX_BLOCKS = 1 << 17
"""Upper bound of the blocks whose scores fit one program (8.4 million tokens in blocks of 64)."""

LONG = 512
"""From this number of blocks on, queries with at most a half or a quarter of the blocks search only these. The time of
a search grows with its width, which is otherwise that of the last query, rounded up to a power of two."""


def check_width(width: int) -> None:
    """Check that the scores of a query fit one program.

    Raises:
        ValueError: more than ``MAX_BLOCKS`` blocks.
    """
    if width > MAX_BLOCKS:
        raise ValueError(f"q: expected at most {MAX_BLOCKS} selection blocks of select_block_size tokens, got {width}")


def write_top_blocks(
    scores: Scores,
    positions: Positions | None,
    out: Tensor,
    first_row: int,
    *,
    config: NSAConfig,
    num_warps: int | None = None,
) -> None:
    """Write the selected blocks of the queries from ``first_row`` on to ``out``.

    Args:
        scores: importance of the blocks for ``scores.num_rows`` queries.
        positions: of all queries; None for one whole sequence from token 0.
        out: block_indices, int32 ``(B, Hkv, T, n)``, contiguous.
        first_row: the first query of ``scores``.
        config: the sizes.
        num_warps: warps per program; by default a thread holds at most 32 scores.
    """
    batch, kv_heads, num_queries, num_selected = out.shape
    block_j = padded(scores.width, least=1)
    top_blocks_kernel[(batch * kv_heads * scores.num_rows,)](
        scores.own, scores.passed, *position_arguments(out, *tensors_of(positions)[:2]), out,
        first_row, scores.num_rows, num_queries, scores.width,
        KV_HEADS=kv_heads, LENGTH=config.compress_block_size, STRIDE=config.compress_stride,
        BLOCK_SIZE=config.select_block_size, FIRST=scores.band.first, HAS_PASSED=any(scores.band.passed),
        HAS_POSITIONS=positions is not None, SIGNED=config.index_score is not None, AHEAD=config.ahead,
        NUM_INIT=config.num_init_blocks, NUM_LOCAL=config.num_local_blocks,
        NUM_SELECTED=num_selected, BLOCK_J=block_j, BLOCK_N=padded(num_selected, least=1),
        LEVELS=3 if block_j >= LONG else 1, num_warps=num_warps or min(max(block_j // 1024, 1), 32),
    )  # fmt: skip


@jit
def choose(
    own_ptr, passed_ptr, out_ptr, last, current, visible,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, HAS_PASSED: tl.constexpr,
    SIGNED: tl.constexpr, NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr, NUM_SELECTED: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the best of blocks ``0 .. last``, at most ``BLOCK_J`` of them, in ascending order; -1 after ``current``."""
    # Blocks without a visible key were never written: their importance is zero, and no product is theirs.
    block = tl.arange(0, BLOCK_J)
    first_key = block * (BLOCK_SIZE // STRIDE)
    unseen = float("-inf") if SIGNED else 0.0
    least = -2147483648 if SIGNED else -1
    score = tl.load(own_ptr + block, mask=(block <= last) & (first_key + FIRST < visible), other=unseen)
    if HAS_PASSED:
        reached = first_key - (LENGTH // STRIDE - 1) < visible
        score += tl.load(passed_ptr + block - 1, mask=(block > 0) & (block <= last) & reached, other=0.0)

    forced = (block < NUM_INIT) | (block > last - NUM_LOCAL)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # 0 of -0
    if SIGNED:
        bits ^= (bits >> 31) & 0x7FFFFFFF
    rank = tl.where(forced, 2147483647, bits)
    rank = tl.where(block <= last, rank, least)

    # Find the largest threshold that at least n candidates reach. With n candidates or fewer it stays below all.
    threshold = 0
    if SIGNED:
        threshold = tl.where(tl.sum((rank >= 0).to(tl.int32)) >= NUM_SELECTED, 0, least)
    bit = tl.where(last >= NUM_SELECTED, 30, -1)
    while bit >= 0:
        trial = threshold | (1 << bit)
        count = tl.sum((rank >= trial).to(tl.int32))
        threshold = tl.where(count >= NUM_SELECTED, trial, threshold)
        bit = tl.where(count == NUM_SELECTED, -1, bit - 1)

    total = tl.minimum(last + 1, NUM_SELECTED)
    above = rank > threshold
    tied = rank == threshold
    num_tied = total - tl.sum(above.to(tl.int32))
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32)) <= num_tied))
    slot = tl.cumsum(chosen.to(tl.int32)) - 1

    tl.store(out_ptr + slot, tl.where(block <= current, block, -1), mask=chosen)
    padding = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + padding, -1, mask=(padding >= total) & (padding < NUM_SELECTED))


@jit(do_not_specialize=["first_row", "num_rows", "num_queries", "width"])
def top_blocks_kernel(
    own_ptr, passed_ptr, token_ptr, start_ptr, position_stride_b, out_ptr, first_row, num_rows, num_queries, width,
    KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    HAS_PASSED: tl.constexpr, HAS_POSITIONS: tl.constexpr, SIGNED: tl.constexpr, AHEAD: tl.constexpr,
    NUM_INIT: tl.constexpr, NUM_LOCAL: tl.constexpr, NUM_SELECTED: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Select the blocks of one query, for one kv head, by a search no larger than its number of blocks requires."""
    local_row = tl.program_id(0) % num_rows
    head = (tl.program_id(0) // num_rows).to(tl.int64)
    row = first_row + local_row
    at = (head // KV_HEADS) * position_stride_b
    token, start = load_positions(token_ptr + at, start_ptr + at, row, num_queries, HAS_POSITIONS)
    visible = count_visible(token - start, LENGTH, STRIDE)
    current = tl.minimum((token - start) // BLOCK_SIZE, width - 1)
    last = tl.minimum((token - start + AHEAD) // BLOCK_SIZE, width - 1)

    cell = (head * num_rows + local_row) * tl.multiple_of(width, 16)
    own, passed, out = own_ptr + cell, passed_ptr + cell, out_ptr + (head * num_queries + row) * NUM_SELECTED
    for halvings in tl.static_range(LEVELS):  # pyright: ignore[reportGeneralTypeIssues]
        many = last >= (BLOCK_J >> halvings) // 2
        if (last < BLOCK_J >> halvings) & (many | (halvings == LEVELS - 1)):
            choose(
                own, passed, out, last, current, visible, LENGTH, STRIDE, BLOCK_SIZE, FIRST, HAS_PASSED, SIGNED,
                NUM_INIT, NUM_LOCAL, NUM_SELECTED, BLOCK_J >> halvings, BLOCK_N,
            )  # fmt: skip
