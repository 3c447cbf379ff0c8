"""What a compiler emitted for one function: Python modules, and the Triton kernels that stand in them as text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Kernel:
    """One Triton kernel of a module of ``direction``."""

    name: str
    direction: str
    source: str

    @cached_property
    def autotuner(self) -> Any:
        """Inductor's own: the kernel and the configurations that it may be launched with."""
        from torch._inductor.codecache import PyCodeCache

        return getattr(PyCodeCache.load(self.source), self.name)

    @property
    def is_template(self) -> bool:
        """Whether this is FlexAttention's, and no fused pointwise operation or reduction."""
        return self.autotuner.heuristic_type.name == "TEMPLATE"


@dataclass
class Module:
    """One module: ``forward``, ``backward``, or ``inference`` where nothing requires a gradient."""

    direction: str
    source: str
    constants: dict[str, torch.Tensor]
    run: Callable[[Module, list[Any]], Sequence[Any]] | None = None
    """Who runs it, as nothing here can."""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the module as Inductor's would be."""
        if self.run is None:
            raise RuntimeError(f"the {self.direction} module was only emitted")
        return self.run(self, args)

    @cached_property
    def kernels(self) -> list[Kernel]:
        """The statements ``name = async_compile.triton('name', source, ...)``."""
        kernels = []
        for node in ast.parse(self.source).body:
            call = node.value if isinstance(node, ast.Assign) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "async_compile.triton":
                name, source = (ast.literal_eval(argument) for argument in call.args[:2])
                kernels.append(Kernel(name, self.direction, source))
        return kernels


@dataclass
class Emitted:
    """All that is known of a function that was compiled."""

    modules: list[Module] = field(default_factory=list)
    graph: Callable[..., Sequence[Any]] | None = None
    """The function between the inputs and outputs of its graph, with its gradient."""
    inputs: list[tuple[int, int | None]] = field(default_factory=list)
    """Of each input of the graph the number of the argument, and the dimension if it is a size of that."""
    outputs: list[tuple[str, int]] = field(default_factory=list)
    """Of each tensor in the result its number among those of the ``"graph"``, or among the ``"arguments"``."""
    structure: pytree.TreeSpec | None = None
    """Of the result."""

    @property
    def kernels(self) -> list[Kernel]:
        """Those of all modules, in the order in which they are defined."""
        return [kernel for module in self.modules for kernel in module.kernels]

    def source(self, direction: str) -> str:
        """Text of the module of one direction."""
        return next(module.source for module in self.modules if module.direction == direction)
