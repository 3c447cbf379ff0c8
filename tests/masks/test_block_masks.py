"""Masks list every (query, key) pair of the definition once, as full where it may, and weigh what the length says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexnsa.config import NSAConfig, num_compressed
from flexnsa.masks.compressed import compressed_intervals, compressed_mask
from flexnsa.masks.document import document_positions
from flexnsa.masks.intervals import Intervals, interval_block_mask, tiles_touched
from flexnsa.masks.positions import Positions
from flexnsa.masks.selected import SelectedMask, selected_mask
from flexnsa.masks.window import window_intervals, window_mask
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
        assert mask.full_kv_num_blocks[0, 0].tolist() == full
        assert mask.full_q_num_blocks.sum() == sum(full)


PAPER = NSAConfig()


def sizes(document_ids: torch.Tensor) -> list[int]:
    """Bytes of the masks of the three branches, and of selected tokens; each query selects the block it stands in."""
    positions = document_positions(document_ids, PAPER)
    seq_len = document_ids.shape[1]
    blocks = torch.full((1, 1, seq_len, PAPER.num_selected_blocks), -1, dtype=torch.int32)
    blocks[..., 0] = (positions.token - positions.start) // PAPER.select_block_size
    num_keys = num_compressed(seq_len, PAPER)
    selected = selected_mask(blocks, positions, seq_len, rows=16, config=PAPER)
    masks = [
        compressed_mask(positions, seq_len, num_keys, PAPER, document_ids.device),
        window_mask(positions, seq_len, seq_len, PAPER, document_ids.device),
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


CONFIG = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4)


def positions_of(token: Tensor, start: Tensor) -> Positions:
    token, start = (x.int().view(-1, x.shape[-1]) for x in (token, start))
    return Positions(token, start, torch.zeros_like(start))


def random_blocks(batch: int, heads: int, token: Tensor, start: Tensor, config: NSAConfig) -> Tensor:
    """Any blocks of the query's own document up to its own, any number of them up to n."""
    chosen = torch.full((batch, heads, len(token), config.num_selected_blocks), -1, dtype=torch.int32)
    for row in chosen.flatten(0, 1):
        for t in range(len(token)):
            candidates = int(token[t] - start[t]) // config.select_block_size + 1
            count = min(int(torch.randint(0, config.num_selected_blocks + 1, ())), candidates)
            row[t, :count] = torch.randperm(candidates)[:count].sort().values
    return chosen


def definition(blocks: Tensor, token: Tensor, start: Tensor, num_keys: int, config: NSAConfig) -> Tensor:
    """Block ``j`` of a query holds tokens ``[start + j*l', start + (j+1)*l')``, seen up to the query's own."""
    s = torch.arange(num_keys)
    first = (start[:, None] + blocks * config.select_block_size)[..., None]
    inside = (first <= s) & (s < first + config.select_block_size) & (blocks >= 0)[..., None]
    return (inside & (s <= token[:, None, None])).sum(-2).int()


def reached(selected: SelectedMask, pairs: Tensor, rows: int, num_keys: int) -> Tensor:
    """Count pairs per token instead of per gathered key; all rows of a query must agree."""
    per_query = pairs.unflatten(2, (-1, rows))
    assert (per_query == per_query[:, :, :, :1]).all()
    tokens = selected.tokens[:, :, None].expand(-1, -1, per_query.shape[2], -1)
    found = torch.zeros(*tokens.shape[:3], num_keys, dtype=torch.int32)
    return found.scatter_add(-1, tokens.long(), per_query[:, :, :, 0])


def check(blocks: Tensor, positions: Positions | None, want: Tensor, rows: int, config: NSAConfig) -> None:
    num_keys = want.shape[-1]
    selected = selected_mask(blocks, positions, num_keys, rows=rows, config=config)
    for pairs in (pairs_by_rows(selected.block_mask), pairs_by_columns(selected.block_mask)):
        assert torch.equal(reached(selected, pairs, rows, num_keys), want)


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_whole_sequence(seq_len: int, rows: int) -> None:
    token, start = torch.arange(seq_len), torch.zeros(seq_len, dtype=torch.long)
    blocks = random_blocks(2, 2, token, start, CONFIG)
    want = definition(blocks, token, start, seq_len, CONFIG)
    check(blocks, None, want, rows, CONFIG)
    check(blocks, positions_of(token, start), want, rows, CONFIG)


@pytest.mark.parametrize("lengths", [[100], [10, 3, 17, 1, 5, 16, 16, 2, 30], [1] * 40, [5, 60, 35], [33, 33, 34]])
def test_documents_that_start_anywhere(lengths: list[int]) -> None:
    ends = torch.tensor(lengths).cumsum(0)
    token = torch.arange(sum(lengths))
    start = (ends - torch.tensor(lengths)).repeat_interleave(torch.tensor(lengths))
    blocks = random_blocks(2, 2, token, start, CONFIG)
    check(blocks, positions_of(token, start), definition(blocks, token, start, len(token), CONFIG), 2, CONFIG)


def test_some_queries_of_documents() -> None:
    ids, token = (torch.arange(300)[None] // 45), torch.tensor([0, 7, 44, 45, 46, 120, 133, 299])
    start = token // 45 * 45
    blocks = random_blocks(1, 2, token, start, CONFIG)
    positions = document_positions(ids, CONFIG).at_tokens(token)
    check(blocks, positions, definition(blocks, token, start, 300, CONFIG), 2, CONFIG)


def test_queries_at_the_end_of_the_keys() -> None:
    """As in decoding with a cache: few queries, many keys, of which the last are not written yet."""
    token, start = torch.tensor([70, 71, 72]), torch.zeros(3, dtype=torch.long)
    blocks = random_blocks(1, 2, token, start, CONFIG)
    check(blocks, positions_of(token, start), definition(blocks, token, start, 90, CONFIG), 1, CONFIG)


def test_queries_anywhere_gather_blocks_and_no_boundaries() -> None:
    """Where all sequences start at token 0 every block is one run of keys, as in a whole sequence."""
    token = torch.cat([torch.arange(20, 45), torch.tensor([70]), torch.arange(200, 219)])
    blocks = random_blocks(1, 2, token, torch.zeros_like(token), CONFIG)
    positions = Positions.of_queries(token)
    check(blocks, positions, definition(blocks, token, torch.zeros_like(token), 220, CONFIG), 2, CONFIG)
    gathered = selected_mask(blocks, positions, 220, rows=1, config=CONFIG).tokens.shape[-1]
    assert gathered <= 224 + len(token) + 128


@pytest.mark.parametrize("seq_len", [64, 1000, 4096])
def test_no_list_is_longer_than_the_capacity(seq_len: int) -> None:
    """Worst case: every query selects block 0, which a plain transpose makes one loop over the whole sequence."""
    blocks = torch.full((1, 1, seq_len, CONFIG.num_selected_blocks), -1, dtype=torch.int32)
    blocks[..., 0] = 0
    mask = selected_mask(blocks, None, seq_len, rows=16, config=CONFIG).block_mask
    assert mask.q_num_blocks.sum() == seq_len
    assert mask.q_num_blocks.max() == min(seq_len, CONFIG.select_block_size * CONFIG.num_selected_blocks)


def test_lists_name_queries_in_order() -> None:
    """So that sums over them round the same way in every run."""
    token, start = torch.arange(500), torch.zeros(500, dtype=torch.long)
    blocks = random_blocks(1, 2, token, start, CONFIG)
    mask = selected_mask(blocks, None, 500, rows=1, config=CONFIG).block_mask
    used = torch.arange(1, mask.q_indices.shape[-1]) < mask.q_num_blocks[..., None]
    assert (mask.q_indices.diff(dim=-1) > 0)[used].all()
