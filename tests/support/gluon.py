"""Kernels in Gluon, run on a CPU: their Python is called with PyTorch's tensors, one program after the other.

That shows whether indices, masks and sums are right, and that no access leaves its tensor. It does not show layouts,
races or what the compiler makes of a kernel: copies and products are done at once, and layouts mean nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FOLDER = "flexnsa.attention.triton.kernels"
HELPERS = ("visible", "selected_pairs", "intervals", "hopper.rows")
KERNELS = ("intervals_fwd", "intervals_bwd", "window_sums", "selected_fwd", "selected_bwd")


class Value:
    """A number or a tensor of a program."""

    def __init__(self, data: Any) -> None:
        self.data = torch.as_tensor(data)

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)
    type = property(lambda _: SimpleNamespace(layout=None))

    def to(self, dtype: Any) -> Value:
        return Value(self.data & 0xFFFFFFFF if dtype == "uint32" else self.data.to(dtype))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.permute(*order))

    def __getitem__(self, at: Any) -> Value:
        return Value(self.data[at])

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


class Pointer(Value):
    """Where elements of a tensor are, counted from its first."""

    def __init__(self, tensor: Tensor, data: Any = 0) -> None:
        super().__init__(data)
        self.tensor = tensor

    dtype = property(lambda self: SimpleNamespace(element_ty=self.tensor.dtype))

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.tensor, self.data[at])

    def elements(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory of the tensor, the places in it, and which of them are accessed; check that they exist."""
        at, real = torch.broadcast_tensors(self.data, torch.as_tensor(True) if mask is None else plain(mask))
        last = sum((size - 1) * stride for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        outside = at[real & ((at < 0) | (at > last))]
        assert not outside.numel(), f"access to {outside.min()} .. {outside.max()} of a tensor that ends at {last}"
        memory = torch.empty(0, dtype=self.tensor.dtype).set_(self.tensor.untyped_storage())
        return memory, torch.where(real, at + self.tensor.storage_offset(), 0), real


def plain(x: Any) -> Any:
    """Return what PyTorch computes with."""
    return x.data if isinstance(x, Value) else x


def _operation(function: Callable[[Any, Any], Any], *, turned: bool = False) -> Callable[[Value, Any], Value]:
    def operate(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        data = function(plain(other), self.data) if turned else function(self.data, plain(other))
        return Pointer(self.tensor, data) if isinstance(self, Pointer) else Value(data)

    return operate


def _divide(a: Any, b: Any) -> Tensor:
    return torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="trunc")  # as in C


for name in ("add", "sub", "mul", "truediv", "and_", "or_", "rshift"):
    function = getattr(operator, name)
    setattr(Value, f"__{name.strip('_')}__", _operation(function))
    setattr(Value, f"__r{name.strip('_')}__", _operation(function, turned=True))
for name in ("lt", "le", "gt", "ge", "eq"):
    setattr(Value, f"__{name}__", _operation(getattr(operator, name)))
for name, function in {"floordiv": _divide, "mod": lambda a, b: a - _divide(a, b) * b}.items():
    setattr(Value, f"__{name}__", _operation(function))


class Shared:
    """A tile in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: tuple(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, at: Any) -> Shared:
        return Shared(self.data[int(plain(at))])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)

    def load(self, _layout: object) -> Value:
        return Value(self.data.clone())


class Language:
    """The functions of ``gluon.language`` that the kernels use."""

    constexpr, float32, int64, int32, uint32 = object, torch.float32, torch.int64, torch.int32, "uint32"
    static_range = range

    def __init__(self) -> None:
        self.program, self.programs, self.warps = (0, 0), (1, 1), 4

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.endswith("Layout"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def load(self, at: Pointer, mask: Any = None, other: float = 0.0, **_: object) -> Value:
        memory, place, real = at.elements(mask)
        return Value(torch.where(real, memory[place], torch.tensor(other, dtype=memory.dtype)))

    def store(self, at: Pointer, value: Any, mask: Any = None, **_: object) -> None:
        memory, place, real = at.elements(mask)
        memory[place[real]] = torch.broadcast_to(torch.as_tensor(plain(value)).to(memory.dtype), place.shape)[real]

    def arange(self, start: int, end: int, _layout: object = None) -> Value:
        return Value(torch.arange(start, end))

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, _layout: object = None) -> Value:
        return Value(torch.full(tuple(shape), value, dtype=dtype))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, _layout: object = None) -> Value:
        return self.full(shape, 0, dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Value:
        return Value(torch.where(torch.as_tensor(plain(condition)), plain(a), plain(b)))

    def minimum(self, a: Any, b: Any) -> Value:
        return Value(torch.minimum(*map(torch.as_tensor, (plain(a), plain(b)))))

    def maximum(self, a: Any, b: Any) -> Value:
        a, b = map(torch.as_tensor, (plain(a), plain(b)))
        return Value(torch.maximum(a, b.to(a.dtype)))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return x.reshape(shape)

    def broadcast(self, a: Value, b: Value) -> tuple[Value, Value]:
        a_data, b_data = torch.broadcast_tensors(a.data, b.data)
        return Value(a_data), Value(b_data)

    def convert_layout(self, x: Value, _layout: object) -> Value:
        return x

    def num_warps(self) -> int:
        return self.warps

    def program_id(self, axis: int) -> Value:
        return Value(self.program[axis])

    def num_programs(self, axis: int) -> Value:
        return Value(self.programs[axis])

    def allocate_shared_memory(
        self, dtype: torch.dtype, shape: Sequence[int], _layout: object, value: Value | None = None
    ) -> Shared:
        unwritten = torch.full(tuple(shape), float("nan") if dtype.is_floating_point else -(2**30)).to(dtype)
        return Shared(unwritten if value is None else value.data.clone())

    def inline_asm_elementwise(self, code: str, _constraints: str, args: Sequence[Any], *_: object) -> Value:
        functions: dict[str, Any] = {"lg2": torch.log2, "rcp": torch.reciprocal, "tan": torch.tanh}
        return Value(functions.get(code[:3], lambda x: x)(torch.as_tensor(plain(args[0]))))

    def copy(self, to: Shared, at: Pointer, mask: Any = None) -> None:
        to.data.copy_(self.load(at, mask).data)


for name in ("exp2", "log2", "sum", "max", "min"):
    of_tensor = getattr(Tensor, f"a{name}" if name[0] == "m" else name)
    setattr(Language, name, lambda _, x, *args, of_tensor=of_tensor: Value(of_tensor(x.data, *args)))


def _multiply(a: Any, b: Any, acc: Value, use_acc: bool = True, **_: object) -> Value:
    product = a.data.float() @ b.data.float()
    return Value(acc.data + product if use_acc else product)


def _wait_for_products(_pending: int, deps: Sequence[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _nothing(*_: object, **__: object) -> None:
    return None


class Program:
    """A kernel, whose launch runs its programs one after the other."""

    def __init__(self, function: Callable[..., None], language: Language) -> None:
        self.function, self.language = function, language
        self.launches = 0

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = [Pointer(x) if isinstance(x, Tensor) else Value(x) if isinstance(x, int) else x for x in args]
            names = signature(self.function).parameters
            constants = {name: x for name, x in options.items() if name in names}
            assert len(given) + len(constants) == len(names), "an argument is missing, or there is one too many"
            self.launches += 1
            self.language.programs, self.language.warps = grid, options["num_warps"]
            for heads in range(grid[1]):
                for tile in range(grid[0]):
                    self.language.program = tile, heads
                    self.function(*given, **constants)

        return launch


@contextmanager
def hopper_on_a_cpu() -> Iterator[Mapping[str, Program]]:
    """Run the kernels for Hopper in place of those in Triton, and give them by name."""
    from flexnsa.attention.plan import Plan

    language = Language()
    copies = SimpleNamespace(commit_group=_nothing, wait_group=_nothing)
    parts = {
        "gl": language,
        "tl": language,
        "async_copy": copies,
        "async_load": language.copy,
        "barrier": _nothing,
        "fence_async_shared": _nothing,
    }
    parts |= {"warpgroup_mma": _multiply, "warpgroup_mma_wait": _wait_for_products}
    found = dict[int, Callable[..., Any]]()
    programs = dict[str, Program]()
    with ExitStack() as stack:
        for name in (*HELPERS, *(f"hopper.{kernel}" for kernel in KERNELS)):
            module = import_module(f"{FOLDER}.{name}")
            for kernel, program in _translate(module, parts, found, language).items():
                stack.enter_context(mock.patch.object(module, kernel, program))
                programs[kernel] = program
        stack.enter_context(mock.patch.object(Plan, "in_gluon", property(lambda _: True)))
        yield programs


def _translate(
    module: ModuleType, parts: Mapping[str, Any], found: dict[int, Callable[..., Any]], language: Language
) -> dict[str, Program]:
    """Return the kernels of a module, and add all its functions to those that were ``found``, by what they replace."""
    names = {**vars(module), **parts}
    programs = dict[str, Program]()
    for name, x in vars(module).items():
        source = getattr(getattr(x, "function", x), "fn", None)
        if source is None or source.__module__ != module.__name__:
            names[name] = parts.get(name, found.get(id(x), x))
        elif name.startswith("hopper_"):
            programs[name] = Program(FunctionType(source.__code__, names, name, source.__defaults__), language)
        else:
            is_constant = "constexpr" in type(x).__name__.lower()
            function = _nothing if is_constant else FunctionType(source.__code__, names, name, source.__defaults__)
            names[name] = found[id(x)] = function
    return programs
