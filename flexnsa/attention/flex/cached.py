"""``flex`` where the keys are a cache: few queries, sequences that start at token 0, no backward.

The heads of a group share their keys, so they are rows of one tile. The compressed branch and the window have three
variants, chosen by :class:`flexnsa.attention.plan.Plan`:

1. The fewest queries, on CUDA, go to FlexAttention's decoding kernel, which divides the keys of a query among programs
   and merges their results. The kernel for long queries would run one program for each head and tile of queries.
2. A few queries go to the kernel for long queries, with all heads of a group in one tile.
3. More queries go to the branch of whole sequences.

The selected branch has the first, and for all other queries one that reads blocks in place: without backward it needs
no list of the queries of a block, and gathers nothing.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexnsa.attention.compilation import compile_once
from flexnsa.attention.flex import branches, kernels
from flexnsa.attention.interface import BranchOutput, Call, Compressed, WindowBranch
from flexnsa.attention.plan import Plan, padded_group
from flexnsa.attention.tiles.flex import KernelOptions, decoding_tiles, dense_tiles, sparse_tiles
from flexnsa.masks.cached import cached_interval_mask, cached_selected_mask
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.intervals import interval_block_mask, tiles_touched
from flexnsa.masks.positions import Positions, positions_of
from flexnsa.masks.user_mods import ScoreMod, mod_of_compressed, mod_of_tokens
from flexnsa.masks.window import window_intervals

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

PROGRAMS = 512
"""Programs to divide a step among: a few for each multiprocessor of the largest GPUs."""
TILE = 64
"""Keys of a tile of the dense branches in the decoding kernel."""


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """As :func:`flexnsa.attention.flex.branches.compressed`."""
    kernels.check_heads(q, v_cmp)
    plan = Plan.of(q, k_cmp, has_mod=call.score_mod is not None)
    if plan.divide_keys:
        return Compressed(*compile_once(_divided_compressed)(q, k_cmp, v_cmp, call))
    if plan.fit_tile:
        return Compressed(*_folded(_compressed_in_place, q, k_cmp, v_cmp, call))
    return branches.compressed(q, k_cmp, v_cmp, call)


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """As :func:`flexnsa.attention.flex.branches.window`."""
    kernels.check_heads(q, v)
    plan = Plan.of(q, k, has_mod=call.score_mod is not None)
    if plan.divide_keys:
        return compile_once(_divided_window)(q, k, v, call)
    if plan.fit_tile:
        return _folded(branches.window, q, k, v, call)
    return branches.window(q, k, v, call)


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    """As :func:`flexnsa.attention.flex.branches.selected`, for positions that all start at 0."""
    kernels.check_blocks(q, call.config)
    kernels.check_heads(q, v, kernels.rows_of_query(q, k))
    attend_to = _divided_selected if Plan.of(q, k, has_mod=call.score_mod is not None).divide_keys else _selected
    return branches.compiled(attend_to, q, call.positions)(q, k, v, block_indices, call)


def _folded(attend_to: WindowBranch, q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    """Attend with the heads of a group as queries at the same position."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return attend_to(q, k, v, call)

    def repeat(positions: Positions | None) -> Positions | None:
        return positions and positions.map(lambda x: x.repeat_interleave(groups, dim=1))

    call = replace(call, positions=repeat(call.positions), window_positions=repeat(call.window_positions))
    return kernels.unfold_heads(attend_to(kernels.fold_heads(q, groups, groups), k, v, call), groups, groups)


def _compressed_in_place(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> BranchOutput:
    intervals = compressed_intervals(positions_of(q, call.positions), call.config)
    mask = interval_block_mask(intervals, k_cmp.shape[2], widths=None)
    return branches.compiled(_contiguous, q, call.positions)(q, k_cmp, v_cmp, mask, call.scale)


def _contiguous(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> BranchOutput:
    # Repeating or padding the keys, which pays in training, would copy all of them for each step.
    options = {**dense_tiles(*kernels.sizes_of_tiles(q, v)), "BLOCKS_ARE_CONTIGUOUS": True}
    return kernels.attend(q, k, v, mask, scale, options)


def _selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    groups, rows = q.shape[1] // k.shape[1], kernels.rows_of_query(q, k)
    mask, kernel_mod = _selected_mask(q, k, block_indices, call, rows=rows, groups=groups)
    options = sparse_tiles(*kernels.sizes_of_tiles(q, v), *mask.BLOCK_SIZE)
    folded = kernels.attend(kernels.fold_heads(q, rows, groups), k, v, mask, call.scale, options, kernel_mod)
    return kernels.unfold_heads(folded, rows, groups)


def _selected_mask(
    q: Tensor, k: Tensor, block_indices: Tensor, call: Call, *, rows: int, groups: int
) -> tuple[BlockMask, ScoreMod | None]:
    positions = positions_of(q, call.positions)
    mask = cached_selected_mask(block_indices, positions.token, k.shape[2], rows=rows, config=call.config)
    return mask, call.score_mod and mod_of_tokens(call.score_mod, positions, rows=rows, groups=groups)


def _divided_compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> BranchOutput:
    (rows, groups), config, positions = _fold(q, k_cmp), call.config, positions_of(q, call.positions)
    mask = cached_interval_mask(compressed_intervals(positions, config), k_cmp.shape[2], rows=rows, tile=TILE)
    kernel_mod = call.score_mod and mod_of_compressed(
        call.score_mod, positions, config=config, rows=rows, groups=groups
    )
    return _divide_keys(q, k_cmp, v_cmp, mask, PROGRAMS, call.scale, kernel_mod)


def _divided_selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> BranchOutput:
    rows, groups = _fold(q, k)
    mask, kernel_mod = _selected_mask(q, k, block_indices, call, rows=rows, groups=groups)
    return _divide_keys(q, k, v, mask, operator.index(call.config.num_selected_blocks), call.scale, kernel_mod)


def _divided_window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BranchOutput:
    (rows, groups), config, positions = _fold(q, k), call.config, positions_of(q, call.window_positions)
    mask = cached_interval_mask(window_intervals(positions, config), k.shape[2], rows=rows, tile=TILE)
    kernel_mod = call.score_mod and mod_of_tokens(call.score_mod, positions, rows=rows, groups=groups)
    most_tiles = tiles_touched(operator.index(config.window_size), TILE)
    return _divide_keys(q, k, v, mask, most_tiles, call.scale, kernel_mod)


def _divide_keys(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, most_tiles: int, scale: float, kernel_mod: ScoreMod | None
) -> BranchOutput:
    """Call the decoding kernel with a tile for each query, which has up to ``most_tiles`` tiles of keys."""
    # The kernel needs the number of programs at compile time. Only the number of keys may vary.
    batch, heads, count = operator.index(q.shape[0]), operator.index(k.shape[1]), operator.index(q.shape[2])
    (rows, tile), (_, groups) = mask.BLOCK_SIZE, _fold(q, k)
    splits = max(1, min(most_tiles, PROGRAMS // (batch * heads * count)))
    tiles = decoding_tiles(*kernels.sizes_of_tiles(q, v), rows, tile)
    options: KernelOptions = {"BACKEND": "TRITON_DECODE", "SPLIT_KV": splits, **tiles}
    out, aux = flex_attention(
        kernels.fold_heads(q, rows, groups),
        k,
        v,
        score_mod=kernel_mod,
        block_mask=mask,
        scale=scale,
        kernel_options=cast("FlexKernelOptions", options),
        return_aux=AuxRequest(lse=True),
    )
    return kernels.unfold_heads(BranchOutput(out, aux.lse), rows, groups)


def _fold(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the rows of a query's tile in the decoding kernel, and how many of them are heads, as constants."""
    groups = operator.index(q.shape[1]) // operator.index(k.shape[1])
    return padded_group(groups), groups
