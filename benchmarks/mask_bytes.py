"""Print what the masks of the three branches weigh at any length: ``python -m benchmarks.mask_bytes``.

Each line builds the very masks that ``impl="flex"`` gives to CUDA and adds up the memory behind all of their tensors,
key gather included. A slope is ``log2`` of the growth when the sequence doubles: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexnsa import NSAConfig
from flexnsa.attention import flex
from flexnsa.geometry import num_compressed
from flexnsa.masks.selected import selected_mask

ROWS = 16
"""Rows of a token in the selected branch: a group of up to 16 query heads."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shortest", type=int, default=2**12, help="first length")
    parser.add_argument("--longest", type=int, default=2**20, help="last length, doubling from the first")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config, device = NSAConfig(), torch.device(args.device)

    print(f"{config}\n{args.kv_heads} kv heads, groups of up to {ROWS}, built on {device}\n")
    print(f"{'':72} | longest list of query tiles in backward")
    print("   tokens |      cmp B slope |      win B slope |        slc B slope | build s |   cmp   win   slc  slc*")
    before: list[int] | None = None
    seq_len = args.shortest
    while seq_len <= args.longest:
        sizes, seconds, longest = measure(seq_len, args.kv_heads, config, device)
        slopes = [
            "     " if before is None else f"{math.log2(b / a):5.2f}"
            for a, b in zip(before or sizes, sizes, strict=True)
        ]
        columns = (f"{size:{width},} {slope}" for size, slope, width in zip(sizes, slopes, (10, 10, 12), strict=True))
        lists = " ".join(f"{length:5,}" for length in longest)
        print(f"{seq_len:9,} | {' | '.join(columns)} | {seconds:7.3f} | {lists}", flush=True)
        before, seq_len = sizes, 2 * seq_len
    print("\n* if every query selects block 0 alone")


def measure(seq_len: int, kv_heads: int, config: NSAConfig, device: torch.device) -> tuple[list[int], float, list[int]]:
    """Build all masks; give their bytes, the seconds it took, and the longest lists of queries in backward."""
    num_keys = (num_compressed(seq_len, config) // flex.TILE + 1) * flex.TILE
    blocks = spread_blocks(seq_len, kv_heads, config, device)
    cmp, cmp_seconds = timed(lambda: flex._compressed_mask(None, seq_len, num_keys, config, device), device)
    win, win_seconds = timed(lambda: flex._window_mask(None, seq_len, seq_len, config, device), device)
    slc, slc_seconds = timed(lambda: selected_mask(blocks, None, seq_len, rows=ROWS, config=config), device)
    sizes = [total_bytes(mask.as_tuple()) for mask in (cmp, win)]
    sizes.append(total_bytes((*slc.block_mask.as_tuple(), slc.tokens)))
    longest = [longest_list(mask) for mask in (cmp, win, slc.block_mask)]
    del slc
    blocks[..., 0], blocks[..., 1:] = 0, -1
    worst = selected_mask(blocks, None, seq_len, rows=ROWS, config=config)
    return sizes, cmp_seconds + win_seconds + slc_seconds, [*longest, longest_list(worst.block_mask)]


def spread_blocks(seq_len: int, kv_heads: int, config: NSAConfig, device: torch.device) -> Tensor:
    """Pick one block at random from each ``n``-th of every query's past; all of it if it has no more than ``n``."""
    past = torch.arange(seq_len, device=device)[:, None] // config.select_block_size + 1
    most = config.num_selected_blocks
    blocks = torch.empty(1, kv_heads, seq_len, most, dtype=torch.int32, device=device)
    share = torch.arange(most, device=device)
    for head in blocks.unbind(1):
        place = (share + torch.rand(seq_len, most, device=device)) * (past / most)
        head[0] = torch.where(past > most, place.floor(), torch.where(share < past, share, -1)).int()
    return blocks


def timed(build: Callable, device: torch.device) -> tuple:
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    mask = build()
    synchronize()
    return mask, time.perf_counter() - start


def total_bytes(values: Iterable[object]) -> int:
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def longest_list(mask: BlockMask) -> int:
    """Count the query tiles that the busiest tile of keys meets: each is one step of a serial loop in backward."""
    assert mask.q_num_blocks is not None
    full = 0 if mask.full_q_num_blocks is None else mask.full_q_num_blocks
    return int((mask.q_num_blocks + full).max())


if __name__ == "__main__":
    main()
