"""Operators that ``torch.compile`` does not trace into.

An opaque operator returns values and, where a backward is registered, first derivatives in reverse mode, inside the
transforms of ``torch.func`` too. Every other derivative raises an error; by default PyTorch would drop the tangents of
such an operator, and forward mode would return 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from hashlib import sha256
from inspect import Parameter, Signature, signature
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction

from flexnsa.operators.replay import Replayed

_LIBRARY = torch.library.Library("flexnsa", "FRAGMENT")


P = ParamSpec("P")
T = TypeVar("T")


def opaque_operator(
    name: str, *, mutates: Sequence[str] = (), launches_kernels: bool = False
) -> Callable[[Callable[P, T]], OpaqueOperator[P, T]]:
    """Register a function of tensors and numbers as ``flexnsa::name``.

    An argument may be a ``NamedTuple`` of tensors and numbers; the schema has its fields one by one.

    The function returns no view and writes only to the arguments that ``mutates`` names. Autocast is off inside it, and
    its kernels are launched on the GPU of its first argument, whichever GPU is current. One that ``launches_kernels``
    runs on fake tensors too, where Triton begins to compile them: ``torch.compile`` traces meanwhile. Its launches are
    replayed (:mod:`flexnsa.operators.replay`).
    """

    def register(function: Callable[P, T]) -> OpaqueOperator[P, T]:
        return OpaqueOperator(name, function, mutates, launches_kernels=launches_kernels)

    return register


class OpaqueOperator(Generic[P, T]):
    """An operator with the registered derivatives, which raises for all others; see :func:`opaque_operator`.

    The dispatcher calls its ``Autograd`` kernel once for each level of ``torch.func``, compiled or not, so that kernel
    sees every tangent. (``torch.library.custom_op`` has no hook there.)
    """

    def __init__(
        self, name: str, function: Callable[P, T], mutates: Sequence[str], *, launches_kernels: bool = False
    ) -> None:
        hints = get_type_hints(function)
        kinds = [hints[parameter] for parameter in signature(function).parameters]
        self._records = [kind if hasattr(kind, "_fields") else None for kind in kinds]
        self._count = sum(len(record._fields) if record else 1 for record in self._records)
        replayed = Replayed(function, self._nested) if launches_kernels else None

        @_outside_dynamo
        def kernel(*args: Any) -> T:
            device: torch.device = args[0].device
            with torch.no_grad(), _without_autocast(device), _current(device):
                # Keywords have become positions.
                return replayed(*args) if replayed else function(*self._nested(args))  # pyright: ignore[reportCallIssue]

        self.name, self.function = f"{_LIBRARY.ns}::{name}", function
        self._kernel, self._launches_kernels = kernel, launches_kernels
        schema = torch.library.infer_schema(self._prototype(function, hints), mutates_args=mutates)
        torch.library.define(self.name, schema, lib=_LIBRARY, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(self.name, "default", kernel, lib=_LIBRARY)
        _LIBRARY.impl(name, self._with_derivatives, "Autograd")
        self._operator = getattr(torch.ops.flexnsa, name).default
        self.register_autograd(self._no_backward, setup_context=lambda *_: None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the operator."""
        return self._operator(*_fields(args, self._records), **kwargs, **_version())

    def run(self, *args: Any) -> T:
        """Call the function on the arguments of the schema, not through the operator."""
        return self.function(*self._nested(args))  # pyright: ignore[reportCallIssue]  (as the schema has it)

    def _prototype(self, function: Callable[P, T], hints: dict[str, Any]) -> Callable[P, T]:
        """Return a function with the signature of the schema, which ends with the digest that tells versions apart."""
        parameters = list[Parameter]()
        for parameter, record in zip(signature(function).parameters.values(), self._records, strict=True):
            fields = get_type_hints(record) if record else {parameter.name: hints[parameter.name]}
            parameters += [parameter.replace(name=name, annotation=kind) for name, kind in fields.items()]
        source = Parameter("source", Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str)

        def prototype(*args: P.args, **kwargs: P.kwargs) -> T:
            return function(*args, **kwargs)

        returned = None if hints["return"] is NoneType else hints["return"]
        prototype.__signature__ = Signature([*parameters, source], return_annotation=returned)  # pyright: ignore[reportFunctionMemberAccess]
        return prototype

    def _nested(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of the function, given those of the schema."""
        rest, nested = iter(args[: self._count]), list[Any]()  # PyTorch leaves out the last ones that are defaults
        for record in self._records:
            nested += [record(*islice(rest, len(record._fields)))] if record else islice(rest, 1)
        return nested

    def register_fake(self, function: Callable[..., T]) -> Callable[..., T]:
        """Register a function that returns empty results of the right shapes and dtypes."""

        def fake(*args: Any) -> T:
            if self._launches_kernels and _can_compile_ahead(args):
                self._kernel(*args)
            return function(*self._nested(args))

        torch.library.register_fake(self.name, fake, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the backward; both functions have the signatures of a :class:`torch.autograd.Function`."""
        members = {"forward": self._forward, "setup_context": setup_context, "backward": backward}
        members = {name: staticmethod(member) for name, member in members.items()}
        self._function: Any = type(self.name, (_SingleLevelFunction,), members)

    def register_backward(
        self,
        backward: Callable[..., tuple[Tensor | None, ...]],
        *,
        differentiable: int | None = None,
        keep: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] | None = None,
    ) -> None:
        """Register what returns the gradients of the first inputs from operators; the other inputs have none.

        Its arguments are the gradients of the floating results (the first is always a tensor, another is None where
        nothing depends on that result), the inputs that are tensors or None, the results, and the inputs that are
        numbers; of an operator of a named tuple the gradients, the tuple, and the results. Only the first so many
        results are ``differentiable``, by default all floating ones. ``keep`` takes the tuple and the results, and
        returns both with None for the tensors that are not to be saved.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            if differentiable is not None:
                ctx.mark_non_differentiable(*output[differentiable:])
            ctx.set_materialize_grads(False)
            inputs, output = keep(*self._nested(inputs), output) if keep else (inputs, output)
            tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
            ctx.save_for_backward(*tensors, *output)
            ctx.numbers = inputs[len(tensors) :]

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # read once: under activation checkpointing a second read raises
            results = saved[-len(grads) :]
            pairs = list(zip(grads, results, strict=True))[:differentiable]
            first, *rest = (grad for grad, x in pairs if x.is_floating_point())
            first = torch.zeros_like(results[0]) if first is None else first
            inputs = *saved[: -len(grads)], *ctx.numbers
            args = (*self._nested(inputs), *results) if any(self._records) else (*saved, *ctx.numbers)
            gradients = backward(first, *rest, *args)
            return *gradients, *(None,) * (len(inputs) - len(gradients))

        self.register_autograd(differentiate, setup_context=save)

    def _with_derivatives(self, *args: Any) -> Any:
        args = args[: self._count]
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{self.name} has no forward-mode derivative; use impl='reference'")
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            with torch._C._AutoDispatchBelowAutograd():
                return self._operator(*args, **_version())
        with enable_single_level_autograd_function():
            return self._function.apply(*args)

    def _forward(self, *args: Any) -> Any:
        # A Function turns gradients off inside, but the outer levels of torch.func still need theirs.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            return self._operator(*args, **_version())

    def _no_backward(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.name} has no derivative (of this order); use impl='reference'")


def _fields(args: Sequence[Any], records: Sequence[Any]) -> list[Any]:
    """Return the arguments of a schema, given those of a function: the fields of each named tuple in its place."""
    return [y for x, record in zip(args, records[: len(args)], strict=True) for y in (x if record else (x,))]


def _outside_dynamo(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that Dynamo does not trace. PyTorch's decorator alone would import Dynamo, for seconds."""
    untraced = _disable_dynamo(function)
    return lambda *args: (untraced if "torch._dynamo" in sys.modules else function)(*args)


def _version() -> dict[str, str]:
    """Return the digest, for calls by which a compiler finds graphs on disk: those of other versions must differ."""
    return {"source": _source()} if torch.compiler.is_compiling() else {}


def _source() -> str:
    """Return a digest of the package, a constant to compilers."""
    return digest_of(Path(__file__).parents[1])


_source._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  (the decorator imports Dynamo)


@cache
def digest_of(folder: Path) -> str:
    """Return a digest of the Python files in a folder."""
    return sha256(b"".join(file.read_bytes() for file in sorted(folder.rglob("*.py")))).hexdigest()[:16]


def _can_compile_ahead(args: Sequence[Any]) -> bool:
    """Return whether fake arguments are on a GPU of this process, and all sizes are numbers."""
    if args[0].device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    sizes = [size for x in args if isinstance(x, Tensor) for size in x.shape]
    return not any(isinstance(x, torch.SymInt | torch.SymFloat) for x in (*args, *sizes))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current: kernels are launched on the current GPU, not on that of their tensors."""
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if is_other else nullcontext()


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, if it is on."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def in_transform() -> bool:
    """Return whether this is called inside a transform of ``torch.func``."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms(what: str, *tensors: Tensor) -> None:
    """Check that no transform of ``torch.func`` is active and that no tensor has a tangent."""
    if in_transform():
        raise NotImplementedError(
            f"{what} works in no transform of torch.func (grad, vmap, jvp); use impl='sdpa', or 'reference' for jvp"
        )
    if any(unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{what} has no forward-mode derivative; use impl='reference'")
