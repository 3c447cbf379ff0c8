"""Tiles of a decoding step, which has few queries, so that its keys are split among programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexnsa.attention.tiles.device import cdiv, padded
from flexnsa.config import NSAConfig

PROGRAMS = 4
"""Programs per multiprocessor, so that some load while others compute."""
MOST_SPLITS = 32
"""Upper bound of the splits of the dense branches' keys; each stores partial outputs to merge."""
TILE_BYTES = 32 * 1024
"""Bytes of a tile of up to 64 keys and values, or of half a wide one: a step in pages looks up half as many of them in
wide tiles, 150 us instead of 153 at 64k, where one in a single page takes 2 us longer (H200, 32 sequences)."""
MOST_ROWS = 64
"""Upper bound of the (query, head) rows of a program."""


@dataclass(frozen=True, slots=True)
class StepTiles:
    """Launch parameters of a step, whose keys are split among programs.

    Args:
        cmp: splits of the compressed tokens.
        slc: splits of the selected blocks of a query.
        win: splits of the window.
        keys: keys per tile.
        block_keys: keys per tile in a selected block.
        rows: (query, head) rows per program of the dense branches.
        group_rows: heads per program of the selected branch.
    """

    cmp: int
    slc: int
    win: int
    keys: int
    block_keys: int
    rows: int
    group_rows: int


def step_tiles(
    multiprocessors: int,
    dtype: torch.dtype,
    heads: int,
    group: int,
    num_tokens: int,
    dims: tuple[int, int],
    num_keys: tuple[int, int],
    config: NSAConfig,
    *,
    wide: bool = False,
) -> StepTiles:
    """Return the tiles for ``B * Hkv = heads``, each with ``num_keys`` of the compressed branch and the window."""
    num_selected = config.num_selected_blocks
    row_bytes = sum(map(padded, dims)) * dtype.itemsize
    keys = min(64, max(16, 1 << (TILE_BYTES // row_bytes).bit_length() - 1)) << wide
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
        block_keys=min(keys, padded(config.select_block_size)),
        rows=rows,
        group_rows=min(padded(group), MOST_ROWS),
    )
