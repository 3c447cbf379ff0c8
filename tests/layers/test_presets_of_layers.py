"""A layer without options is the recipe for text, one with a config or ``preset="paper"`` is the paper's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexnsa import NativeSparseAttention, NSAConfig, SelectionLoss
from tests.support.inputs import SMALL

SIZES = (32, 4, 2, 8)
PAPER: dict[str, Any] = {"rope_base": 10_000.0, "shared_keys": False, "begin_as_mean": False, "gate": "sigmoid"}
INDEXED = NSAConfig.for_text(4, 2)
TEXT: dict[str, Any] = {
    "rope_base": 1e8,
    "shared_keys": True,
    "begin_as_mean": True,
    "gate": "residual",
    "nsa": INDEXED,
}
PLAIN_GATE = {"gate": "sigmoid"}
"""Of branches without the selected one, or of that alone: nothing is added to it."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TEXT),
        ({"preset": "text"}, TEXT),
        ({"preset": "paper"}, PAPER | {"nsa": NSAConfig()}),
        ({"config": SMALL}, PAPER | {"nsa": SMALL}),
        ({"config": SMALL, "preset": "text"}, TEXT | {"nsa": SMALL}),
        ({"rope_base": 7.0, "shared_keys": False}, TEXT | {"rope_base": 7.0, "shared_keys": False}),
        ({"branches": ("cmp", "win")}, TEXT | PLAIN_GATE | {"nsa": NSAConfig(), "shared_keys": False}),
        ({"branches": ("slc",)}, TEXT | PLAIN_GATE | {"shared_keys": False, "begin_as_mean": False}),
    ],
    ids=str,
)
def test_what_is_left_open_is_of_the_preset(options: dict[str, Any], expected: dict[str, Any]) -> None:
    described = NativeSparseAttention(*SIZES, **options).layer_config
    assert {name: getattr(described, name) for name in expected} == expected


def test_a_layer_of_a_description_is_that_layer_whatever_the_preset_says() -> None:
    built: list[dict[str, Any]] = [{}, {"preset": "paper"}, {"config": SMALL, "rope_base": 7.0}]
    for options in built:
        layer = NativeSparseAttention(*SIZES, **options)
        assert NativeSparseAttention.of(layer.layer_config).layer_config == layer.layer_config


def test_the_sizes_of_the_recipe_take_others_and_fit_the_heads() -> None:
    sizes = NSAConfig.for_text(12, 4, window_size=64)
    assert (sizes.index_heads, sizes.index_block_size, sizes.index_stride, sizes.window_size) == (3, 8, 8, 64)
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads=12, got 5"):
        NSAConfig.for_text(12, 5)


def test_a_layer_without_options_learns_what_to_select() -> None:
    layer, selection = NativeSparseAttention(*SIZES), SelectionLoss()
    out = layer(torch.randn(1, 1200, 32), selection=selection)  # more than 16 blocks of 64
    (out.square().mean() + selection.total).backward()
    assert bool(torch.as_tensor(selection.total) > 0)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert any(bool(parameter.grad.any()) for parameter in layer.indexer.parameters() if parameter.grad is not None)
