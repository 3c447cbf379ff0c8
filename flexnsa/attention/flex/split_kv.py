"""``flex`` for a few queries on a cache on CUDA: FlexAttention's decoding kernel, which divides the keys of a query.

A kernel for long queries runs one program for each tile of queries and head, four of them for a single token with four
key heads. The decoding kernel gives each program a part of the query's list of key tiles and merges what they found.
The heads of a group share their keys, so they are the rows of a query's tile.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexnsa.attention.compilation import compile_once
from flexnsa.attention.flex.kernels import fold_heads, sizes_of_tiles, unfold_heads
from flexnsa.attention.seam import Attended, Call, Compressed
from flexnsa.attention.tiles.flex import KernelOptions, decoding_tiles
from flexnsa.masks.compressed import compressed_intervals
from flexnsa.masks.decoding import cached_interval_mask, cached_selected_mask
from flexnsa.masks.intervals import tiles_touched
from flexnsa.masks.user_mods import ScoreMod, mod_of_compressed, mod_of_tokens
from flexnsa.masks.window import window_intervals
from flexnsa.positions import positions_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import FlexKernelOptions

MAX_ROWS = 127
"""Rows of queries that the decoding kernel takes."""
PROGRAMS = 512
"""Programs to divide a step among: a few for each multiprocessor of the largest GPUs."""
TILE = 64
"""Keys of a tile in the dense branches."""


def is_decoding(q: Tensor, k: Tensor) -> bool:
    """Tell whether these queries ``(B, Hq, T, Dk)`` are so few that they go here."""
    return q.is_cuda and q.shape[2] * _rows(q, k) <= MAX_ROWS


def compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Compressed:
    """As :func:`flexnsa.attention.flex.branches.compressed`."""
    return Compressed(*compile_once(_compressed)(q, k_cmp, v_cmp, call))


def selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    """As :func:`flexnsa.attention.flex.branches.selected`, for positions that all start at 0."""
    return compile_once(_selected)(q, k, v, block_indices, call)


def window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    """As :func:`flexnsa.attention.flex.branches.window`."""
    return compile_once(_window)(q, k, v, call)


def _compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, call: Call) -> Attended:
    rows, config, positions = _rows(q, k_cmp), call.config, positions_of(q, call.positions)
    mask = cached_interval_mask(compressed_intervals(positions, config), k_cmp.shape[2], rows=rows, tile=TILE)
    layout = {"rows": rows, "groups": _groups(q, k_cmp)}
    kernel_mod = call.score_mod and mod_of_compressed(call.score_mod, positions, config=config, **layout)
    return _attend(q, k_cmp, v_cmp, mask, PROGRAMS, call.scale, kernel_mod)


def _selected(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, call: Call) -> Attended:
    rows, config, positions = _rows(q, k), call.config, positions_of(q, call.positions)
    mask = cached_selected_mask(block_indices, positions.token, k.shape[2], rows=rows, config=config)
    kernel_mod = call.score_mod and mod_of_tokens(call.score_mod, positions, rows=rows, groups=_groups(q, k))
    return _attend(q, k, v, mask, operator.index(config.num_selected_blocks), call.scale, kernel_mod)


def _window(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Attended:
    rows, config, positions = _rows(q, k), call.config, positions_of(q, call.window_positions)
    mask = cached_interval_mask(window_intervals(positions, config), k.shape[2], rows=rows, tile=TILE)
    kernel_mod = call.score_mod and mod_of_tokens(call.score_mod, positions, rows=rows, groups=_groups(q, k))
    most_tiles = tiles_touched(operator.index(config.window_size), TILE)
    return _attend(q, k, v, mask, most_tiles, call.scale, kernel_mod)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, most_tiles: int, scale: float, kernel_mod: ScoreMod | None
) -> Attended:
    """Call the kernel, with true tiles of one query by ``BLOCK_SIZE[1]`` keys; a query has up to ``most_tiles``."""
    # The kernel wants to know at compile time how many programs there are. Only keys may be of any number.
    batch, heads, count = operator.index(q.shape[0]), operator.index(k.shape[1]), operator.index(q.shape[2])
    (rows, tile), groups = mask.BLOCK_SIZE, _groups(q, k)
    splits = max(1, min(most_tiles, PROGRAMS // (batch * heads * count)))
    tiles = decoding_tiles(*sizes_of_tiles(q, v), rows, tile)
    options: KernelOptions = {"BACKEND": "TRITON_DECODE", "SPLIT_KV": splits, **tiles}
    out, aux = flex_attention(
        fold_heads(q, rows, groups),
        k,
        v,
        score_mod=kernel_mod,
        block_mask=mask,
        scale=scale,
        kernel_options=cast("FlexKernelOptions", options),
        return_aux=AuxRequest(lse=True),
    )
    return unfold_heads(Attended(out, aux.lse), rows, groups)


def _groups(q: Tensor, k: Tensor) -> int:
    return operator.index(q.shape[1]) // operator.index(k.shape[1])


def _rows(q: Tensor, k: Tensor) -> int:
    """Give the rows of a query's tile: a power of two that tensor cores take."""
    return max(16, 1 << (_groups(q, k) - 1).bit_length())
