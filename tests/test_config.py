"""The configuration is a value, by default the paper's; its counts and overlaps are those of sets of token numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest

from flexnsa.config import NSAConfig, blocks_within, num_blocks, num_compressed, overlap_band
from tests.support import literal
from tests.support.inputs import sizes


def test_defaults_are_those_of_the_paper() -> None:
    config = NSAConfig()
    assert (config.compress_block_size, config.compress_stride, config.select_block_size) == (32, 16, 64)
    assert (config.num_selected_blocks, config.num_init_blocks, config.num_local_blocks) == (16, 1, 2)
    assert config.window_size == 512


def test_is_a_hashable_value() -> None:
    assert NSAConfig() == NSAConfig()
    assert len({NSAConfig(), NSAConfig(), NSAConfig(window_size=64)}) == 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: setattr(NSAConfig(), "window_size", 3), FrozenInstanceError),
        (lambda: NSAConfig(32), TypeError),  # pyright: ignore[reportCallIssue] - fields are given by name only
        (lambda: replace(NSAConfig(), compress_stride=12), ValueError),  # which validates again
    ],
)
def test_changes_are_refused(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


# (l, d, l'): the paper's sizes, no overlap between compressed tokens, l' < l, l' == d, three strides to a token.
GRIDS = [(32, 16, 64), (8, 4, 16), (4, 4, 8), (16, 4, 8), (16, 8, 8), (12, 4, 16), (1, 1, 1)]
grids = pytest.mark.parametrize("config", [sizes(*grid, 3) for grid in GRIDS], ids=map(str, GRIDS))


@grids
def test_num_compressed_counts_the_blocks_that_are_whole(config: NSAConfig) -> None:
    length, stride = config.compress_block_size, config.compress_stride
    for seq_len in range(1, 100):
        whole = [i for i in range(seq_len) if i * stride + length <= seq_len]
        assert num_compressed(seq_len, config) == len(whole), seq_len


@grids
def test_num_blocks_counts_the_unfinished_block(config: NSAConfig) -> None:
    for seq_len in range(1, 100):
        assert num_blocks(seq_len, config) == len({t // config.select_block_size for t in range(seq_len)}), seq_len


@grids
def test_blocks_within_bounds_every_sequence_of_as_many_compressed_tokens(config: NSAConfig) -> None:
    for seq_len in range(1, 100):
        bound = blocks_within(num_compressed(seq_len, config), config)
        assert num_blocks(seq_len, config) <= bound <= num_blocks(seq_len, config) + 1, seq_len


@grids
def test_overlap_band_is_the_shared_tokens_of_every_pair(config: NSAConfig) -> None:
    first, weights = overlap_band(config)
    step = config.select_block_size // config.compress_stride
    for j in range(6):
        for i in range(80):
            offset = i - j * step - first
            assert (weights[offset] if 0 <= offset < len(weights) else 0) == literal.overlap(i, j, config), (i, j)
