"""The configuration is a value: the paper's sizes by default, frozen, comparable, and valid or not there at all."""

from __future__ import annotations

from collections.abc import Callable
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
