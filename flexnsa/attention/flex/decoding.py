"""``flex`` where the keys are a cache: few queries, each row one sequence from token 0, no backward.

The heads of a group are folded into rows in all branches, because they share their keys and a tile has room. Selected
blocks are read where they lie: nothing is gathered, and no list of the queries of a block is needed. The fewest
queries, on CUDA, have a kernel of their own: :mod:`flexnsa.attention.flex.split_kv`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa.attention.flex import branches, split_kv
from flexnsa.attention.flex.kernels import (
    attend,
    check_blocks,
    check_heads,
    fold_heads,
    rows_of_query,
    sizes_of_tiles,
    unfold_heads,
)
from flexnsa.attention.seam import Attended, Call, Compressed
from flexnsa.attention.tiles.flex import dense_tiles, sparse_tiles
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.decoding import cached_selected_mask
from flexnsa.masks.intervals import DENSE_TILE, interval_block_mask
from flexnsa.masks.user_mods import mod_of_tokens
from flexnsa.positions import Positions, positions_of


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """As :func:`flexnsa.attention.flex.branches.compressed`."""
    check_heads(q, v_cmp)
    if split_kv.is_decoding(q, k_cmp):
        return split_kv.compressed(q, k_cmp, v_cmp, call)
    groups = q.shape[1] // k_cmp.shape[1]
    if not _fits_tile(q, groups, call):
        if groups > 1 or call.score_mod is not None:
            return branches.compressed(q, k_cmp, v_cmp, call)
        return Compressed(*_in_place(q, k_cmp, v_cmp, call))
    folded = _in_place(fold_heads(q, groups, groups), k_cmp, v_cmp, _repeated(call, groups))
    return Compressed(*unfold_heads(folded, groups, groups))


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """As :func:`flexnsa.attention.flex.branches.window`."""
    check_heads(q, v)
    if split_kv.is_decoding(q, k):
        return split_kv.window(q, k, v, call)
    groups = q.shape[1] // k.shape[1]
    if not _fits_tile(q, groups, call):
        return branches.window(q, k, v, call)
    folded = branches.window(fold_heads(q, groups, groups), k, v, _repeated(call, groups))
    return unfold_heads(folded, groups, groups)


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    """As :func:`flexnsa.attention.flex.branches.selected`, for positions that all start at 0."""
    check_blocks(q, call.config)
    check_heads(q, v, rows_of_query(q, k))
    if split_kv.is_decoding(q, k):
        return split_kv.selected(q, k, v, block_indices, call)
    return branches.compiled(_selected, q, call.positions)(q, k, v, block_indices, call)


def _in_place(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Attended:
    mask = interval_block_mask(
        compressed_intervals(positions_of(q, call.positions), call.config), k_cmp.shape[2], widths=None
    )
    return branches.compiled(_contiguous, q, call.positions)(q, k_cmp, v_cmp, mask, call.scale)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Attended:
    # As they lie: to repeat or pad the keys, which pays in training, would copy all of them for a token.
    return attend(q, k, v, mask, scale, {**dense_tiles(*sizes_of_tiles(q, v)), "BLOCKS_ARE_CONTIGUOUS": True})


def _selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    groups, rows = q.shape[1] // k.shape[1], rows_of_query(q, k)
    token = positions_of(q, call.positions).token
    mask = cached_selected_mask(block_indices, token, k.shape[2], rows=rows, config=call.config)
    options = sparse_tiles(*sizes_of_tiles(q, v), *mask.BLOCK_SIZE)
    kernel_mod = call.score_mod and mod_of_tokens(call.score_mod, call.positions, rows=rows, groups=groups)
    folded = attend(fold_heads(q, rows, groups), k, v, mask, call.scale, options, kernel_mod)
    return unfold_heads(folded, rows, groups)


def _fits_tile(q: Tensor, groups: int, call: Call) -> bool:
    """Tell whether the heads of a group can be queries at the same position.

    To a score_mod such rows would all be one head; with one, heads stay apart.
    """
    return groups > 1 and groups * q.shape[2] <= DENSE_TILE and call.score_mod is None


def _repeated(call: Call, times: int) -> Call:
    """Let each query stand where it does several times in a row."""

    def repeat(positions: Positions | None) -> Positions | None:
        return positions and positions.map(lambda x: x.repeat_interleave(times, dim=1))

    return replace(call, positions=repeat(call.positions), window_positions=repeat(call.window_positions))
