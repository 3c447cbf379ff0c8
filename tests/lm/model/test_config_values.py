"""Configs are values: hashable, equal after a round trip, whatever type of sequence their fields had."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

import flexnsa
from flexnsa import lm as models
from flexnsa import lm as training
from flexnsa.lm import DecoderConfig, preset

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
    public = [getattr(module, name) for module in (flexnsa, models, training) for name in module.__all__]
    frozen = [x for x in public if is_dataclass(x) and x.__dataclass_params__.frozen]  # pyright: ignore[reportAttributeAccessIssue]
    assert DecoderConfig in frozen
    of_several = {
        field.name for config in frozen for field in fields(config) if str(field.type).startswith(("tuple", "Seq"))
    }
    assert of_several == {*SEQUENCES, "stages"}  # which tests/lm/training/test_stages.py looks at
