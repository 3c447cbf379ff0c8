"""Calls of Triton's language in its interpreter: each is taken apart once, and then only its steps are repeated.

Types, shapes and constants alone tell which steps of the interpreter's builder a call comes to. To find these costs
ten times as much as the steps, and kernels make the same calls in every program and every loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


class Recorder:
    """The interpreter's builder, which notes the steps of one call.

    ``values`` are the handles that the call gets, and then all that its steps get and give; steps go by their places.
    """

    def __init__(self, handles: list[Any]) -> None:
        self.values, self.changing = [*handles], {*range(len(handles))}
        self.steps: list[tuple[Callable[..., Any], list[int], int]] = []

    def place(self, value: Any) -> int:
        self.values.append(value)
        return next(number for number, known in enumerate(self.values) if known is value)

    def __getattr__(self, name: str) -> Any:
        member = getattr(interpreter.interpreter_builder, name)

        def step(*given: Any) -> Any:
            got = member(*given)
            *places, place = map(self.place, (*given, got))
            if name.startswith("create_get") or not self.changing.isdisjoint(places):  # others give constants
                self.steps.append((member, places, place))
                self.changing.add(place)
            return got

        return step if name.startswith("create_") else member

    def replay(self, result: tl.tensor | None) -> Callable[[list[Any]], tl.tensor | None]:
        """Return a function of a call's handles that takes the same steps to a result of the same type."""
        steps, place = self.steps, None if result is None else self.place(result.handle)
        constants = [None if number in self.changing else x for number, x in enumerate(self.values)]
        attributes = {} if result is None else vars(result) | {"handle": None}

        def repeat(handles: list[Any]) -> tl.tensor | None:
            values = [*handles, *constants[len(handles) :]]
            for member, given, got in steps:
                values[got] = member(*[values[number] for number in given])
            if place is None:
                return None
            again = object.__new__(tl.tensor)
            vars(again).update(attributes, handle=values[place])
            return again

        return repeat


def kind(x: Any, handles: list[Any]) -> Any:
    """Return what of an argument decides about the steps, and add its handles to those before."""
    if isinstance(x, tl.tensor):
        handles.append(x.handle)
        return tl.tensor, str(x.type)
    if isinstance(x, (tuple, list, tl.tuple)):
        return type(x), *[kind(part, handles) for part in x]
    if isinstance(x, slice):
        return slice, x.start, x.stop, x.step
    if isinstance(x, tl.constexpr):
        return tl.constexpr, kind(x.value, handles)
    if isinstance(x, tl.dtype):
        return str(x)
    return type(x), x if x is None or isinstance(x, (int, float, str)) else object()  # others are never known


def patch_attr(target: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Have the interpreter call a function of the language, as its own function of this name does, or repeat a call."""
    semantic, known = interpreter.interpreter_semantic, dict[Any, Callable[[list[Any]], Any]]()

    def call(*args: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        handles, kinds = list[Any](), None
        if semantic.builder is builder:  # and does not record, for which this call is part of another
            kinds = kind((*args, *options.items()), handles)
        if kinds is None or len({*map(id, handles)}) < len(handles):  # x + x has fewer handles than x + y
            return member(*args, **options, _semantic=semantic)
        if kinds in known:
            return known[kinds](handles)
        semantic.builder = recorder = Recorder(handles)
        try:
            result = member(*args, **options, _semantic=semantic)
        finally:
            semantic.builder = builder
        if result is None or isinstance(result, tl.tensor):
            known[kinds] = recorder.replay(result)
        return result

    scope.set_attr(target, name, call)
