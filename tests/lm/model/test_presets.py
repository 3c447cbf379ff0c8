"""Configs are values that a round trip keeps, and the presets have published sizes and numbers of parameters."""

import inspect
import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import flexnsa
from flexnsa import NativeSparseAttention
from flexnsa import lm as models
from flexnsa.layers.config import LayerConfig
from flexnsa.lm import PRESETS, TRAIN_PRESETS, DecoderConfig, DecoderLM, preset
from flexnsa.lm.estimate import parameter_count
from flexnsa.lm.model import config as presets
from flexnsa.lm.model.config import changed


@pytest.mark.parametrize(("name", "num_layers"), [("small", 5), ("large", 4), ("m7c-125m", 12)])
def test_dense_presets_have_the_parameters_that_the_architecture_says(name: str, num_layers: int):
    config = preset(name, attention="dense", num_layers=num_layers)
    with torch.device("meta"):
        model = DecoderLM(config)
    dim, heads, kv_heads, head_dim = config.dim, config.num_heads, config.num_kv_heads, config.head_dim
    attention = dim * head_dim * (2 * heads + 2 * kv_heads)
    assert _size(model) == num_layers * (attention + 8 * dim * dim + 2 * dim) + 2 * 256 * dim + dim


def test_nsa_preset_adds_keys_values_gates_and_compression_to_its_twin():
    with torch.device("meta"):
        nsa, dense = (DecoderLM(preset("large", attention=attention)) for attention in ("nsa", "dense"))
    attention = nsa.layers[0].get_submodule("attention")
    assert isinstance(attention, nn.Module)
    compression = sum(_size(attention.get_submodule(name)) for name in ("phi_k", "phi_v"))
    keys_and_values, gates = 2 * 2 * 768 * 2 * 64, 768 * 12 * 3
    assert _size(nsa) - _size(dense) == 5 * (keys_and_values + gates + compression)


def test_presets_are_the_published_sizes():
    large = {"large", "m7c-125m", "m7c-cpu", "paper", "text-125m"}
    assert set(PRESETS) == set(TRAIN_PRESETS) == large | {"small", "text-small"}
    for name in large:
        config = PRESETS[name]
        assert (config.dim, config.num_heads, config.num_kv_heads, config.head_dim) == (768, 12, 2, 64)
        assert config.is_checkpointed(0) == name.startswith("m7c")
    assert preset("large", num_layers=10).num_layers == 10


def test_presets_have_the_settings_of_a_layer_of_their_name() -> None:
    for name, config in PRESETS.items():
        text = name.startswith("text")
        layer = NativeSparseAttention(
            config.dim, config.num_heads, config.num_kv_heads, config.head_dim, preset="text" if text else "paper"
        )
        sizes = {} if name.endswith("small") else {"nsa": layer.config}
        described = {option.name: getattr(layer.layer_config, option.name) for option in fields(LayerConfig)}
        assert replace(config, **described | {"nsa": config.nsa, "v_head_dim": None} | sizes) == config, name
        assert (config.nsa.index_heads is not None) == text
    assert TRAIN_PRESETS["paper"] == TRAIN_PRESETS["text-125m"]
    assert TRAIN_PRESETS["small"] == TRAIN_PRESETS["text-small"]


@pytest.mark.parametrize(("kv_heads", "branches"), [(1, ("cmp", "slc", "win")), (8, ("slc",)), (2, ("cmp", "win"))])
def test_the_indexer_of_a_preset_fits_other_heads_and_branches(kv_heads: int, branches: tuple[str, ...]) -> None:
    config = preset("text-small", num_kv_heads=kv_heads, branches=branches)
    assert config.nsa.index_heads == (8 // kv_heads if "slc" in branches else None)
    fewer = replace(config, nsa=replace(config.nsa, index_heads=1)) if "slc" in branches else config
    assert changed(fewer, dim=64).nsa == fewer.nsa
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads=8, got 3"):
        preset("text-small", num_kv_heads=3)


def test_numbers_of_parameters_beside_the_presets_are_true():
    source = inspect.getsource(presets)
    for config in PRESETS.values():
        nsa, dense = (parameter_count(replace(config, attention=attention)) for attention in ("nsa", "dense"))
        assert f"# {nsa:,} and {dense:,}" in source
    assert PRESETS["m7c-125m"] == PRESETS["m7c-cpu"]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


SEQUENCES: dict[str, list[Any]] = {"branches": ["win", "slc"], "recompute": ["slc"]}
"""Fields that hold several values; their order stays."""


def with_field(name: str, value: Any) -> DecoderConfig:
    return preset("small", **({"branches": ("slc", "win")} | {name: value}))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_of_any_kind_is_the_same_value(name: str, kind: type) -> None:
    config = with_field(name, kind(SEQUENCES[name]))
    assert getattr(config, name) == tuple(SEQUENCES[name])
    assert config == with_field(name, tuple(SEQUENCES[name]))
    assert len({config, with_field(name, tuple(SEQUENCES[name])), replace(config)}) == 1
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert DecoderConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("name", "value"), [("branches", "slc"), ("branches", ["slc", "slc"]), ("recompute", ["cmp"])])
def test_wrong_sequences_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected some of .*, got "):
        with_field(name, value)


def test_every_public_config_that_holds_sequences_is_looked_at() -> None:
    public = [getattr(module, name) for module in (flexnsa, models) for name in module.__all__]
    frozen = [x for x in public if is_dataclass(x) and x.__dataclass_params__.frozen]  # pyright: ignore[reportAttributeAccessIssue]
    assert DecoderConfig in frozen
    of_several = {x.name for config in frozen for x in fields(config) if str(x.type).startswith(("tuple", "Seq"))}
    assert of_several == {*SEQUENCES, "stages"}  # which tests/lm/training/test_stages.py looks at
