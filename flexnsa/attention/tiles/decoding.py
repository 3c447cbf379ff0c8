"""How a decoding step is cut: few queries, so that the keys are what programs divide among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexnsa.attention.tiles.device import cdiv, padded

PROGRAMS = 4
"""Wanted for each multiprocessor: enough for some to load while others compute."""
MOST_SPLITS = 32
"""Parts of the dense branches' keys, each of which leaves rows to be merged."""
TILE_BYTES = 32 * 1024
"""Of a tile of keys and values."""
MOST_ROWS = 64
"""(query, head) rows of a program."""


@dataclass(frozen=True, slots=True)
class StepTiles:
    """How the keys of a step are divided.

    Args:
        cmp: parts of the compressed tokens.
        slc: parts of the selected blocks of a query.
        win: parts of the window.
        keys: of a tile.
        block_keys: of a tile of a selected block.
        rows: (query, head) rows of a program of the dense branches.
        group_rows: heads of a program of the selected branch.
        num_warps: of a program.
    """

    cmp: int
    slc: int
    win: int
    keys: int
    block_keys: int
    rows: int
    group_rows: int
    num_warps: int


def step_tiles(
    multiprocessors: int,
    dtype: torch.dtype,
    *,
    heads: int,
    group: int,
    num_tokens: int,
    dims: tuple[int, int],
    num_keys: tuple[int, int],
    num_selected: int,
    block_size: int,
) -> StepTiles:
    """Choose by what there is to do: ``heads`` pairs of a row and a kv head, each with its ``num_keys`` (cmp, win)."""
    row_bytes = sum(map(padded, dims)) * dtype.itemsize
    keys = min(64, max(16, 1 << (TILE_BYTES // row_bytes).bit_length() - 1))
    rows = min(padded(num_tokens * group), MOST_ROWS)
    programs = cdiv(PROGRAMS * multiprocessors, heads)
    dense = min(cdiv(programs, cdiv(num_tokens * group, rows)), MOST_SPLITS)
    chunk = max(keys, cdiv(sum(num_keys), dense))
    cmp, win = (max(1, cdiv(count, chunk)) for count in num_keys)
    per_program = cdiv(num_selected, min(num_selected, cdiv(programs, num_tokens)))
    return StepTiles(
        cmp=cmp,
        slc=cdiv(num_selected, per_program),
        win=win,
        keys=keys,
        block_keys=min(keys, padded(block_size)),
        rows=rows,
        group_rows=min(padded(group), MOST_ROWS),
        num_warps=4,
    )
