"""Whatever a public function is called with, it answers rightly or says by name which argument is wrong.

Each row of ``CALLS`` is a right call, as data. A test changes up to two of its arguments for something drawn at random:
another kind of thing, another size, shape, dtype, layout, device or value. What it then gives must be what it promises;
what it raises must be a TypeError or a ValueError that begins with the name of an argument, and leaves its object as it
was. CI draws the same calls every time; ``pytest tests/test_any_call.py --hypothesis-profile thorough`` draws 10,000.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import flexnsa
from flexnsa import NSAConfig, mods
from flexnsa.attention.flex import branches as flex
from tests.support.right_calls.attention import ATTENTION
from tests.support.right_calls.call import Call
from tests.support.right_calls.models import MODELS
from tests.support.right_calls.rows import ROWS
from tests.support.wrong_calls import Drawn, calls

CALLS: dict[str, Call] = {**ATTENTION, **ROWS, **MODELS}
"""A right call of every public function and class."""


class Reached(Exception):  # noqa: N818  (not an error)
    """FlexAttention would be compiled now, for seconds: the arguments have been found right."""


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_once(_: object, **__: object) -> Callable[..., Any]:
        def reached(*_: object, **__: object) -> Any:
            raise Reached

        return reached

    monkeypatch.setattr(flex, "compile_once", compile_once)


HEALTH_CHECKS: tuple[HealthCheck, ...] = tuple(HealthCheck)  # pyright: ignore[reportAssignmentType]
"""None applies: calls are slow to make, and most are refused."""


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("name", CALLS)
def test_any_call_is_right_or_names_the_argument(name: str) -> None:
    call = CALLS[name]

    @settings(suppress_health_check=HEALTH_CHECKS, deadline=None)
    @given(calls(call))
    def check(drawn: Drawn) -> None:
        states = [] if call.state is None else [call.state()]
        before = copy.deepcopy(states)
        try:
            result = call.function(*states, **drawn.arguments)
        except Reached:
            return
        except (TypeError, ValueError, *call.errors) as error:
            message = str(error)
            first = message.partition(":")[0].split("[")[0]
            known = (*call.arguments, *call.also, *(f.name for f in fields(NSAConfig)))
            assert first in known or any(f"'{x}'" in message for x in drawn.changed), (message, drawn)
            assert drawn.changed, f"a right call was refused: {message}"
            for was, state in zip(before, states, strict=True):
                assert same(was, state), "a call that failed has changed what it works on"
        else:
            assert not drawn.wrong, f"accepted: {drawn}"
            assert call.expected(result, drawn.arguments), drawn

    check()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(same, a, b))
    tensors = [x.state_dict() if hasattr(x, "state_dict") else vars(x) for x in (a, b)]
    return all(torch.equal(x, tensors[1][key]) for key, x in tensors[0].items() if isinstance(x, Tensor))


def test_every_public_name_has_its_call() -> None:
    results = {"NSAAux", "MaskMod", "ScoreMod"}  # and types of functions, which nobody calls
    public = {*flexnsa.__all__, *(n for n, f in vars(mods).items() if getattr(f, "__module__", "") == mods.__name__)}
    assert public - results <= CALLS.keys()
