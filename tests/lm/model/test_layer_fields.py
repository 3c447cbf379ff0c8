"""An option of a layer is one field of ``LayerConfig``: layers, models and commands have it."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, fields, replace
from typing import Any, cast

import pytest
import torch

from flexnsa import NativeSparseAttention, NSAConfig
from flexnsa.layers.config import LayerConfig
from flexnsa.layers.presets import PAPER
from flexnsa.lm import DecoderConfig, DecoderLM
from flexnsa.lm.cli import train
from flexnsa.lm.cli.options import described_fields
from flexnsa.lm.diagnosis.non_finite import failing_branch
from tests.support.inputs import SMALL, TINY
from tests.support.layer_fields import CHANGED, FIELDS, NEEDED, SIZES

NOT_OF_TRAIN = {"nsa": "its fields are options"}


@pytest.mark.parametrize("name", FIELDS)
def test_model_keeps_the_value_of_a_layer_field(name: str) -> None:
    value = CHANGED.get(name, True)
    config = DecoderConfig(**SIZES | NEEDED.get(name, {}) | {"num_layers": 1, name: value})
    layer = DecoderLM(config).layers[0].get_submodule("attention")
    assert isinstance(layer, NativeSparseAttention)
    assert getattr(layer.layer_config, name) == value
    assert DecoderConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", FIELDS)
def test_layer_and_model_have_the_same_default(name: str) -> None:
    of_layer = inspect.signature(NativeSparseAttention).parameters["config" if name == "nsa" else name].default
    of_model = next(field.default for field in fields(DecoderConfig) if field.name == name)
    open_in_layer = of_layer is None and name in PAPER  # filled in from a preset
    expected = PAPER[name] if open_in_layer else of_layer
    assert FIELDS[name].default == of_model == (MISSING if expected is inspect.Parameter.empty else expected)


def test_layer_config_follows_attributes_that_are_set() -> None:
    layer = NativeSparseAttention.of(LayerConfig(**SIZES, gate="softmax"))
    layer.impl, layer.config, layer.num_heads, layer.num_kv_heads = "reference", TINY, 2, 1
    changes: dict[str, Any] = {"impl": "reference", "nsa": TINY, "num_heads": 2, "num_kv_heads": 1, "v_head_dim": 4}
    assert layer.layer_config == replace(LayerConfig(**SIZES, gate="softmax"), **changes)


def test_train_has_an_option_for_every_layer_field() -> None:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    options = {action.dest: action.help for action in parser._actions}
    assert FIELDS.keys() - options.keys() == NOT_OF_TRAIN.keys()
    described = described_fields(LayerConfig)
    assert described.keys() == FIELDS.keys()
    assert all(options[name] == described[name] for name in FIELDS.keys() - NOT_OF_TRAIN.keys())


OPTIONS: list[dict[str, Any]] = [
    {"compression": "mean"},
    {"gate": "softmax", "recompute": ("win", "cmp")},
    {"gate": "residual", "recompute": ("slc",)},
    {"shared_keys": True, "begin_as_mean": True, "v_head_dim": 6},
    {"branches": ("cmp", "win"), "compression": "linear"},
    {"branches": ("slc",)},
    {"nsa": replace(SMALL, index_heads=2, index_block_size=4, index_stride=4), "index_rank": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_branches_run_alone_with_the_options_of_their_layer(options: dict[str, Any]) -> None:
    layer = NativeSparseAttention.of(LayerConfig(**SIZES | options))
    x = torch.randn(1, 40, 16)
    assert failing_branch(layer, x, {}) is None
    for tag in layer.branches:
        weight = layer.get_parameter(f"w_v_{tag}.weight")
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] = torch.inf
            assert failing_branch(layer, x, {}) == tag
            weight.copy_(kept)


def test_a_layer_is_built_from_a_description_of_one() -> None:
    with pytest.raises(TypeError, match=r"^config: expected LayerConfig, got NSAConfig\("):
        NativeSparseAttention.of(cast("LayerConfig", NSAConfig()))
