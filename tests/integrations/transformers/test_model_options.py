"""Options of models are values: whichever kind of sequence they were given as, they have a hash and are equal."""

from __future__ import annotations

from typing import Any

import pytest

from flexnsa.transformers import DropInOptions, LayerOptions

GIVEN: list[tuple[Any, dict[str, list[Any]]]] = [
    (DropInOptions, {"branches": ["slc", "win"]}),
    (DropInOptions, {"gates": [1.0, 0.5, 0.25]}),
    (LayerOptions, {"branches": ["slc", "win"]}),
    (LayerOptions, {"recompute": ["slc"]}),
]


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_a_list_is_the_same_value_as_a_tuple(kind: Any, given: dict[str, list[Any]]) -> None:
    of_tuples = kind(**{name: tuple(value) for name, value in given.items()})
    assert len({kind(**given), of_tuples}) == 1


@pytest.mark.parametrize(("kind", "given"), GIVEN)
def test_wrong_options_are_named(kind: Any, given: dict[str, list[Any]]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        kind(**{name: ["other"]})
