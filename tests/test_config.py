"""The configuration is a value: the paper's sizes by default, frozen, comparable, and valid or not there at all."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from flexnsa.config import NSAConfig


def test_defaults_are_those_of_the_paper() -> None:
    config = NSAConfig()
    assert (config.compress_block_size, config.compress_stride, config.select_block_size) == (32, 16, 64)
    assert (config.num_selected_blocks, config.num_init_blocks, config.num_local_blocks) == (16, 1, 2)
    assert config.window_size == 512


def test_is_a_hashable_value() -> None:
    assert NSAConfig() == NSAConfig()
    assert len({NSAConfig(), NSAConfig(), NSAConfig(window_size=64)}) == 2


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        NSAConfig().window_size = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_fields_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        NSAConfig(32)  # pyright: ignore[reportCallIssue]


def test_replace_validates_again() -> None:
    with pytest.raises(ValueError, match="compress_stride"):
        replace(NSAConfig(), compress_stride=12)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_selected_blocks": 3},  # all of them forced
        {"num_init_blocks": 0, "num_local_blocks": 0, "num_selected_blocks": 1},
        {"compress_block_size": 64, "select_block_size": 32},  # a compressed token longer than a block
        {"compress_block_size": 1, "compress_stride": 1, "select_block_size": 1, "window_size": 1},
    ],
)
def test_accepts_every_size_that_fits(sizes: dict[str, int]) -> None:
    config = NSAConfig(**sizes)
    assert all(getattr(config, name) == value for name, value in sizes.items())
