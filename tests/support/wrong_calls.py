"""Strategies that change a right call: what could stand in the place of each kind of argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from flexnsa import NSAConfig
from flexnsa.primitives import describe
from tests.support.inputs import SMALL
from tests.support.right_calls.call import Call, near, shift


class Foreign:
    """Nothing that any function knows."""


class Junk:
    """Marks a value that is of another kind than any right one, so that to accept it is wrong."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Junk({self.value!r})"


def junk(*besides: type) -> st.SearchStrategy[Any]:
    """Draw something that is no instance of these classes."""
    numbers = [3, -1, 0.5, math.nan, True, 2**63, np.float32(3), np.int64(3), 1j]
    things = ["", "cmp", b"ab", (), (1, 2), [3], {}, {"window_size": 3}, {3}, Foreign(), Foreign, shift]
    arrays = [np.ones(3), np.ones((2, 4, 20, 16), np.float32), torch.ones(2), torch.float32, SMALL]
    return st.sampled_from([Junk(x) for x in (*numbers, *things, *arrays) if not isinstance(x, besides)] + [Junk(None)])


@st.composite
def changed_tensor(draw: st.DrawFn, x: Tensor) -> Tensor:
    """Draw a tensor that differs from ``x`` in shape, dtype, layout, device or values."""
    dim = draw(st.integers(0, max(0, x.dim() - 1)))
    changes: dict[str, Callable[[], Tensor]] = {
        "another dtype": lambda: x.to(draw(st.sampled_from(DTYPES))),
        "another device": lambda: x.to("meta"),
        "a dimension more": lambda: x[None],
        "a parameter": lambda: x.clone().requires_grad_(x.is_floating_point()),
        "a sparse one": lambda: x.to_sparse(),
        "noise": lambda: (torch.randn(x.shape) * 100).to(x.dtype),
        "one value": lambda: torch.full_like(x, draw(st.sampled_from(values_of(x.dtype)))),
        "a value": lambda: one_changed(
            x, draw(st.integers(0, max(0, x.numel() - 1))), draw(st.sampled_from(values_of(x.dtype)))
        ),
        "no tensor subclass": lambda: torch.nn.Parameter(x, requires_grad=False),
    }
    if x.dim():
        changes |= {
            "a dimension less": lambda: x.select(dim, 0) if x.shape[dim] else x,
            "no entry": lambda: x.narrow(dim, 0, 0),
            "fewer entries": lambda: x.narrow(dim, 0, max(0, x.shape[dim] - 1)),
            "more entries": lambda: torch.cat((x, x), dim),
            "reversed": lambda: x.flip(dim),
            "transposed": lambda: x.transpose(dim, -1),
            "with strides": lambda: x.transpose(dim, -1).contiguous().transpose(dim, -1),
            "expanded": lambda: x.narrow(dim, 0, 1).expand(x.shape) if x.shape[dim] else x,
        }
    return changes[draw(st.sampled_from(sorted(changes)))]()


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]
DTYPES += [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def values_of(dtype: torch.dtype) -> list[Any]:
    if dtype.is_floating_point:
        return [0.0, -1.0, math.nan, math.inf, -math.inf, 1e30]
    return [0, 1, -1, -2, 3, 1000, *([] if dtype == torch.bool else [torch.iinfo(dtype).max, torch.iinfo(dtype).min])]


def one_changed(x: Tensor, at: int, value: Any) -> Tensor:
    x = x.contiguous().clone()
    if x.numel():
        x.view(-1)[at % x.numel()] = value
    return x


INTS = [0, -1, 1, 2, 3, 5, 7, 12, 64, 2**30 + 1, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 10**5000]
FLOATS = [0.0, -0.0, -1.5, 0.3, 1.0, 2.0, math.nan, math.inf, -math.inf, 1e-320, 1e308, 3, 10**400]
WORDS = ["", "sdpa", "flex", "reference", "auto", "SDPA", "mlp", "mean", "linear", "sigmoid", "softmax", "residual"]
WORDS += ["fp32", "bf16", "dense", "nsa", "large", "cuda", "meta", "cpu", "cuda:99", "é", "q" * 10_000]
BRANCHES = [("cmp",), ("slc",), ["win"], ("win", "cmp"), ("cmp", "slc"), (), ("win", "win"), ("x",), ([],), (None,)]
BRANCHES += ["win"]
CONFIGS = [SMALL, NSAConfig(), NSAConfig(window_size=2**20), NSAConfig(num_init_blocks=0, num_local_blocks=0)]
MODS = [shift, near, lambda: None, lambda *x: x, lambda *x: x[0], lambda *x: 1.0, lambda *x: x[0][0], Foreign]  # noqa: ARG005
DTYPE_VALUES = [*DTYPES, "float32"]


def changed(value: Any, optional: bool) -> st.SearchStrategy[Any]:
    """Draw something in place of a right value; ``Junk`` where nothing right looks like it."""
    nothing = (type(None),) if optional else ()
    if isinstance(value, Tensor):
        # a number may stand for a tensor in crop and soft_cap alone, whose rows have both
        drawn = changed_tensor(value) | junk(Tensor, *NUMBERS)
    elif isinstance(value, bool):
        drawn = st.booleans() | junk(bool)
    elif isinstance(value, int):
        drawn = st.sampled_from(INTS) | junk(int, Tensor, tuple)
    elif isinstance(value, float):
        drawn = st.sampled_from(FLOATS) | junk(int, float, Tensor)
    elif isinstance(value, str):
        drawn = st.sampled_from(WORDS) | junk(str)
    elif isinstance(value, NSAConfig):
        drawn = st.sampled_from(CONFIGS) | junk(NSAConfig)
    elif callable(value):
        drawn = st.sampled_from(MODS if value in (shift, near) else [value]) | junk(type, type(shift))
    elif isinstance(value, torch.dtype):
        drawn = st.sampled_from(DTYPE_VALUES) | junk(torch.dtype)
    elif isinstance(value, tuple):
        drawn = st.sampled_from(BRANCHES) | junk(tuple, list, bool)
    elif isinstance(value, dict):
        drawn = st.sampled_from([{k: v for k, v in value.items() if k != name} for name in value])
        drawn |= st.sampled_from([value | {name: other} for name in value for other in (None, 3, "x", torch.ones(2))])
        drawn |= junk(dict)
    else:
        drawn = junk(type(value))
    return drawn | st.none() if nothing else drawn.filter(lambda x: x is not None)


NUMBERS = (int, float)


class Drawn:
    """A call's arguments, which of them were changed, and whether one of those is beyond doubt wrong."""

    def __init__(self, arguments: dict[str, Any], changed: list[str], wrong: bool) -> None:
        self.arguments, self.changed, self.wrong = arguments, changed, wrong

    def __repr__(self) -> str:
        shown = {name: describe(self.arguments[name]) for name in self.changed}
        unset = [name for name, value in self.arguments.items() if value is None and name not in shown]
        return f"{shown}, None: {unset}"


@st.composite
def calls(draw: st.DrawFn, call: Call) -> Drawn:
    """Draw a right call with up to two arguments changed."""
    arguments = dict(call.arguments)
    for name in call.optional:
        if draw(st.booleans()):
            arguments[name] = None
    names = draw(st.lists(st.sampled_from(sorted(call.arguments)), max_size=2, unique=True)) if call.arguments else []
    wrong = False
    for name in names:
        value = draw(changed(call.arguments[name], name in call.optional))
        if isinstance(value, Junk):
            wrong |= not (value.value is None and name in call.optional)
            value = value.value
        arguments[name] = value
    return Drawn(arguments, names, wrong)
