"""The ``n`` blocks of highest importance, by a search for the n-th largest value (NSA paper, Eq. 11).

One program selects for one query. It keeps the query's ``M`` scores in registers and finds the bits of the n-th largest
one from the highest down, since non-negative floats order like their bits. A bit costs one comparison and one sum over
``M``, and the search ends when exactly ``n`` are left. Nothing is sorted; a cumulative sum yields the ``n`` indices in
ascending order. Each score is read only once.
"""

from __future__ import annotations

from torch import Tensor

from flexnsa.attention.tiles.device import padded
from flexnsa.attention.triton.importance import Scores
from flexnsa.attention.triton.kernels.top_blocks import top_blocks_kernel
from flexnsa.attention.triton.operators import position_arguments
from flexnsa.config import NSAConfig
from flexnsa.positions import Positions, tensors_of

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
        scores.own,
        scores.passed,
        *position_arguments(out, *tensors_of(positions)[:2]),
        out,
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
        HAS_POSITIONS=positions is not None,
        NUM_INIT=config.num_init_blocks,
        NUM_LOCAL=config.num_local_blocks,
        NUM_SELECTED=num_selected,
        BLOCK_J=block_j,
        BLOCK_N=padded(num_selected, least=1),
        LEVELS=3 if block_j >= LONG else 1,
        num_warps=num_warps or min(max(block_j // 1024, 1), 32),
    )
