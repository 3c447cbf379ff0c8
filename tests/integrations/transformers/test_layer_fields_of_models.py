"""An option of a layer is one field of ``LayerConfig``: models of transformers and converted layers have it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from flexnsa.lm import DecoderConfig
from flexnsa.lm.transformers_model import FlexNSAConfig
from flexnsa.transformers import DropInOptions, LayerOptions
from tests.support.layer_fields import CHANGED, FIELDS, NEEDED, SIZES

OF_DENSE = "the dense model has it"
FIXED = "fixed, so that the converted model starts as the dense one"
NOT_OF_CONVERTED = {
    "dim": OF_DENSE,
    "num_heads": OF_DENSE,
    "num_kv_heads": OF_DENSE,
    "head_dim": OF_DENSE,
    "v_head_dim": OF_DENSE,
    "rope_base": OF_DENSE,
    "compression": FIXED,
    "gate": FIXED,
    "shared_keys": FIXED,
    "begin_as_mean": FIXED,
    "nsa": "called sizes; config.flexnsa has its fields",
}


@pytest.mark.parametrize("name", FIELDS)
def test_config_keeps_the_value_of_a_layer_field(name: str) -> None:
    value = CHANGED.get(name, True)
    config = DecoderConfig(**SIZES | NEEDED.get(name, {}) | {"num_layers": 1, name: value})
    assert getattr(FlexNSAConfig.of(config).decoder_config(), name) == value


def test_converted_layer_has_every_layer_field_that_it_does_not_inherit() -> None:
    assert FIELDS.keys() - {field.name for field in fields(LayerOptions)} == NOT_OF_CONVERTED.keys()
    assert all(field.default == FIELDS[field.name].default for field in fields(LayerOptions) if field.name in FIELDS)


GIVEN: list[tuple[Any, dict[str, list[Any]]]] = [
    (DropInOptions, {"branches": ["slc", "win"]}),
    (DropInOptions, {"gates": [1.0, 0.5, 0.25]}),
    (LayerOptions, {"branches": ["slc", "win"]}),
    (LayerOptions, {"recompute": ["slc"]}),
]


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_a_list_is_the_same_value_as_a_tuple_and_a_wrong_one_is_named(kind: Any, given: dict[str, list[Any]]) -> None:
    of_tuples = kind(**{name: tuple(value) for name, value in given.items()})
    assert len({kind(**given), of_tuples}) == 1
    (name,) = given
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        kind(**{name: ["other"]})
