"""Print what the masks of the three branches weigh at any length.

    python -m benchmarks kernels.mask_bytes

Each line builds the very masks that ``impl="flex"`` gives to CUDA and adds up the memory behind all of their tensors,
key gather and captured tables included: for one whole sequence, then for packs of documents. A slope is ``log2`` of the
growth when the sequence doubles: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.harness import options
from benchmarks.harness.clock import Clock
from benchmarks.harness.recording import Recording
from flexnsa import NSAConfig
from flexnsa.config import num_compressed
from flexnsa.masks.compressed import compressed_mask
from flexnsa.masks.document import document_positions
from flexnsa.masks.intervals import DENSE_TILE
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.window import window_mask
from flexnsa.positions import Positions

ROWS = 16
"""Rows of a token in the selected branch: a group of up to 16 query heads."""

WIDTHS = {"cmp": 10, "win": 10, "slc": 12}
"""Of the columns of bytes."""

LONGEST_DOCUMENT: dict[str, int | None] = {
    "one sequence": None,
    "documents of 1 to 900 tokens": 900,
    "documents of one token": 1,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--shortest", type=int, default=2**12, help="first length")
    parser.add_argument("--longest", type=int, default=2**20, help="last length, doubling from the first")
    parser.add_argument("--kv-heads", type=int, default=4)
    args = parser.parse_args(argv)
    recording = options.open_recording(args, __doc__)
    device = torch.device(args.device)
    lengths = [args.shortest]
    while lengths[-1] * 2 <= args.longest:
        lengths.append(lengths[-1] * 2)
    print(f"{NSAConfig()}\n{args.kv_heads} kv heads, groups of up to {ROWS}, built on {device}")
    for name, longest in LONGEST_DOCUMENT.items():
        print(f"\n{name:72} | longest list of query tiles in backward")
        print(
            "   tokens |      cmp B slope |      win B slope |        slc B slope | build s |   cmp   win   slc  slc*"
        )
        print_table(lengths, longest, args.kv_heads, device, recording)
    print("\n* if every query selects block 0 alone")


def print_table(
    lengths: Iterable[int], longest_document: int | None, kv_heads: int, device: torch.device, recording: Recording
) -> None:
    """Print and record a line of each length."""
    config, before = NSAConfig(), dict.fromkeys(WIDTHS, 0)
    for seq_len in lengths:
        positions = None if longest_document is None else packed(seq_len, longest_document, config, device)
        sizes, seconds, longest = measure(seq_len, positions, kv_heads, config, device)
        cells = []
        for (name, width), size in zip(WIDTHS.items(), sizes, strict=True):
            slope = f"{math.log2(size / before[name]):5.2f}" if before[name] else " " * 5
            cells.append(f"{size:{width},} {slope}")
            before[name] = size
        lists = " ".join(f"{length:5,}" for length in longest)
        print(f"{seq_len:9,} | {' | '.join(cells)} | {seconds:7.3f} | {lists}", flush=True)
        point = {"seq_len": seq_len, "longest_document": longest_document, "seconds": seconds, "lists": longest}
        recording.add(point | {"bytes": dict(before)})


def packed(seq_len: int, longest_document: int, config: NSAConfig, device: torch.device) -> Positions:
    """Fill a row with documents of random lengths."""
    draws = random.Random(0)
    starts = torch.zeros(1, seq_len, dtype=torch.int32)
    at = 0
    while at < seq_len:
        starts[0, at] = 1
        at += draws.randint(1, longest_document)
    return document_positions(starts.cumsum(1).to(device), config)


def measure(
    seq_len: int, positions: Positions | None, kv_heads: int, config: NSAConfig, device: torch.device
) -> tuple[list[int], float, list[int]]:
    """Build all masks; give their bytes, the seconds it took, and the longest lists of queries in backward."""
    num_keys = (num_compressed(seq_len, config) // DENSE_TILE + 1) * DENSE_TILE
    blocks = spread_blocks(positions or Positions.of_sequence(seq_len, device), kv_heads, config)
    clock = Clock("wall", device.type)
    start = clock.start()
    cmp = compressed_mask(positions, seq_len, num_keys, config, device)
    win = window_mask(positions, seq_len, seq_len, config, device)
    slc = selected_mask(blocks, positions, seq_len, rows=ROWS, config=config)
    seconds = clock.since(start) / 1e3
    sizes = [total_bytes(tensors(mask)) for mask in (cmp, win)]
    sizes.append(total_bytes([*tensors(slc.block_mask), slc.tokens]))
    longest = [longest_list(mask) for mask in (cmp, win, slc.block_mask)]
    del slc
    blocks[..., 0], blocks[..., 1:] = 0, -1
    worst = selected_mask(blocks, positions, seq_len, rows=ROWS, config=config)
    return sizes, seconds, [*longest, longest_list(worst.block_mask)]


def spread_blocks(positions: Positions, kv_heads: int, config: NSAConfig) -> Tensor:
    """Pick one block at random from each ``n``-th of every query's past; all of it if it has no more than ``n``."""
    past = (positions.token - positions.start)[0, :, None] // config.select_block_size + 1
    seq_len, most = len(past), config.num_selected_blocks
    blocks = torch.empty(1, kv_heads, seq_len, most, dtype=torch.int32, device=past.device)
    share = torch.arange(most, device=past.device)
    for head in blocks.unbind(1):
        place = (share + torch.rand(seq_len, most, device=past.device)) * (past / most)
        head[0] = torch.where(past > most, place.floor(), torch.where(share < past, share, -1)).int()
    return blocks


def tensors(mask: BlockMask) -> Iterator[Tensor]:
    """Return the lists of a mask and the tables that its mask_mod captured."""
    yield from (value for value in mask.as_tuple() if isinstance(value, Tensor))
    yield from captured(mask.mask_mod)


def captured(function: Any) -> Iterator[Tensor]:
    """Return the tensors that a function, or one that it calls, took from where it was made."""
    for cell in getattr(function, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Tensor):
            yield cell.cell_contents
        else:
            yield from captured(cell.cell_contents)


def total_bytes(values: Iterable[Tensor]) -> int:
    storages = [value.untyped_storage() for value in values]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def longest_list(mask: BlockMask) -> int:
    """Count the query tiles that the busiest tile of keys meets: each is one step of a serial loop in backward."""
    assert mask.q_num_blocks is not None
    full = 0 if mask.full_q_num_blocks is None else mask.full_q_num_blocks
    return int((mask.q_num_blocks + full).max())


if __name__ == "__main__":
    main()
