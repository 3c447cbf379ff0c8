"""Masks list every (query, key) pair of the definition once, as full where it may, and weigh what the length says."""

from __future__ import annotations

import pytest
import torch

from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.compressed import compressed_intervals, compressed_mask
from flexnsa.masks.document import document_positions
from flexnsa.masks.intervals import Intervals, interval_block_mask, tiles_touched
from flexnsa.masks.selected import selected_mask
from flexnsa.masks.window import window_intervals, window_mask
from flexnsa.positions import Positions
from tests.support.block_masks import mask_bytes, pairs_by_columns, pairs_by_rows

TILES = [(128, 128), (32, 16), (16, 48)]


def mask_of_window(intervals: Intervals, num_keys: int, window: int, tile: tuple[int, int]):
    widths = tiles_touched(tile[0] + window - 1, tile[1]), tiles_touched(tile[1] + window - 1, tile[0])
    return interval_block_mask(intervals, num_keys, widths=widths, block_size=tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seq_len", [1, 7, 128, 129, 300])
@pytest.mark.parametrize("window", [1, 24, 128, 200, 999])
def test_window_of_a_sequence(seq_len: int, window: int, tile: tuple[int, int]) -> None:
    config = NSAConfig(window_size=window)
    mask = mask_of_window(window_intervals(Positions.of_sequence(seq_len), config), seq_len, window, tile)
    t, s = torch.arange(seq_len)[:, None], torch.arange(seq_len)
    want = ((s <= t) & (s > t - window)).int()
    assert torch.equal(pairs_by_rows(mask)[0, 0], want)
    assert torch.equal(pairs_by_columns(mask)[0, 0], want)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seq_len", [1, 31, 32, 300, 1000])
@pytest.mark.parametrize(("length", "stride"), [(32, 16), (8, 4), (4, 4), (1, 1)])
def test_compressed_tokens_of_a_sequence(seq_len: int, length: int, stride: int, tile: tuple[int, int]) -> None:
    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    num_keys = (num_compressed(seq_len, config) // 128 + 1) * 128
    intervals = compressed_intervals(Positions.of_sequence(seq_len), config)
    mask = interval_block_mask(intervals, num_keys, widths=None, block_size=tile)
    t, i = torch.arange(seq_len)[:, None], torch.arange(num_keys)
    want = (i * stride + length - 1 <= t).int()
    assert torch.equal(pairs_by_rows(mask, consecutive=True)[0, 0], want)
    assert torch.equal(pairs_by_columns(mask, consecutive=True)[0, 0], want)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("compact", [True, False])
def test_any_monotone_intervals_per_batch(tile: tuple[int, int], compact: bool) -> None:
    """Empty intervals, jumps and plateaus, as documents make them."""
    num_queries, num_keys, batch = 211, 170, 3
    lo = torch.randint(0, num_keys, (batch, num_queries)).sort(-1).values.int()
    hi = torch.randint(0, num_keys + 1, (batch, num_queries)).sort(-1).values.int()
    lo[1, :150], hi[1, 40:] = 0, num_keys
    lo[2] = (torch.arange(num_queries) // 50 * 40).int()
    widths = (-(-num_keys // tile[1]), -(-num_queries // tile[0])) if compact else None
    mask = interval_block_mask(Intervals(lo, hi), num_keys, widths=widths, block_size=tile)
    s = torch.arange(num_keys)
    want = ((lo[..., None] <= s) & (s < hi[..., None])).int()
    assert torch.equal(pairs_by_rows(mask, consecutive=not compact)[:, 0], want)
    assert torch.equal(pairs_by_columns(mask, consecutive=not compact)[:, 0], want)


def test_full_tiles_are_found() -> None:
    """Of a causal triangle of 8 x 8 tiles, 28 need no mask; a window over 5 tiles leaves 3 full ones a row."""
    config = NSAConfig(compress_block_size=1, compress_stride=1, window_size=512)
    positions = Positions.of_sequence(1024)
    causal = interval_block_mask(compressed_intervals(positions, config), 1024, widths=None)
    window = mask_of_window(window_intervals(positions, config), 1024, 512, (128, 128))
    for mask, full in ((causal, [0, 1, 2, 3, 4, 5, 6, 7]), (window, [0, 1, 2, 3, 3, 3, 3, 3])):
        assert mask.full_kv_num_blocks is not None
        assert mask.full_q_num_blocks is not None
        assert mask.full_kv_num_blocks[0, 0].tolist() == full
        assert mask.full_q_num_blocks.sum() == sum(full)


CONFIG = NSAConfig()


def sizes(document_ids: torch.Tensor) -> list[int]:
    """Bytes of the masks of the three branches, and of selected tokens; each query selects the block it stands in."""
    positions = document_positions(document_ids, CONFIG)
    seq_len = document_ids.shape[1]
    blocks = torch.full((1, 1, seq_len, CONFIG.num_selected_blocks), -1, dtype=torch.int32)
    blocks[..., 0] = (positions.token - positions.start) // CONFIG.select_block_size
    num_keys = num_compressed(seq_len, CONFIG)
    selected = selected_mask(blocks, positions, seq_len, rows=16, config=CONFIG)
    masks = [
        compressed_mask(positions, seq_len, num_keys, CONFIG, document_ids.device),
        window_mask(positions, seq_len, seq_len, CONFIG, document_ids.device),
        selected.block_mask,
    ]
    return [*(mask_bytes(mask) for mask in masks), selected.tokens.untyped_storage().nbytes()]


def packs(seq_len: int) -> list[torch.Tensor]:
    """One document, one a token, and documents of random lengths."""
    token = torch.arange(seq_len)[None]
    boundaries = torch.rand(1, seq_len, generator=torch.Generator().manual_seed(0)) < 0.01
    return [torch.zeros_like(token), token, boundaries.cumsum(1)]


def test_bytes_are_linear_in_the_sequence_whatever_the_documents() -> None:
    short, long = ([sizes(ids) for ids in packs(seq_len)] for seq_len in (2**12, 2**13))
    assert short[0] == short[1] == short[2]
    assert long[0] == long[1] == long[2]
    for before, after in zip(short[0], long[0], strict=True):
        assert after <= 2.05 * before
