"""Operators that ``torch.compile`` does not trace into.

An opaque operator returns values and, where a backward is registered, first derivatives in reverse mode, inside the
transforms of ``torch.func`` too. Every other derivative raises an error; by default PyTorch would drop the tangents of
such an operator, and forward mode would return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction

from flexnsa.replay import Replayed

_LIBRARY = torch.library.Library("flexnsa", "FRAGMENT")


P = ParamSpec("P")
T = TypeVar("T")


def opaque_operator(
    name: str, *, mutates: Sequence[str] = (), launches_kernels: bool = False
) -> Callable[[Callable[P, T]], OpaqueOperator[P, T]]:
    """Register a function of tensors and numbers as ``flexnsa::name``.

    The function returns no view and writes only to the arguments that ``mutates`` names. Autocast is off inside it, and
    its kernels are launched on the GPU of its first argument, whichever GPU is current. One that ``launches_kernels``
    runs on fake tensors too, where Triton begins to compile them: ``torch.compile`` traces meanwhile. Its launches are
    replayed (:mod:`flexnsa.replay`).
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
        run = Replayed(function) if launches_kernels else function

        @_disable_dynamo
        def kernel(*args: Any) -> T:
            device: torch.device = args[0].device
            with torch.no_grad(), _without_autocast(device), _current(device):
                return run(*args)  # pyright: ignore[reportCallIssue]  (keywords have become positions)

        self.name, self.function = f"{_LIBRARY.ns}::{name}", function
        self._kernel, self._launches_kernels = kernel, launches_kernels
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(self.name, schema, lib=_LIBRARY, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(self.name, "default", kernel, lib=_LIBRARY)
        _LIBRARY.impl(name, self._with_derivatives, "Autograd")
        self._operator = getattr(torch.ops.flexnsa, name).default
        self.register_autograd(self._no_backward, setup_context=lambda *_: None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the operator."""
        return self._operator(*args, **kwargs)

    def register_fake(self, function: Callable[..., T]) -> Callable[..., T]:
        """Register a function that returns empty results of the right shapes and dtypes."""

        def fake(*args: Any) -> T:
            if self._launches_kernels and _can_compile_ahead(args):
                self._kernel(*args)
            return function(*args)

        torch.library.register_fake(self.name, fake, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the backward; both functions have the signatures of a :class:`torch.autograd.Function`."""
        members = {"forward": self._forward, "setup_context": setup_context, "backward": backward}
        members = {name: staticmethod(member) for name, member in members.items()}
        self._function: Any = type(self.name, (_SingleLevelFunction,), members)

    def register_backward(
        self, backward: Callable[..., tuple[Tensor | None, ...]], *, differentiable: int | None = None
    ) -> None:
        """Register what returns the gradients of the first inputs from operators; the other inputs have none.

        Its arguments are the gradients of the floating results (the first is always a tensor, another is None where
        nothing depends on that result), the inputs that are tensors or None, the results, and the inputs that are
        numbers. Only the first so many results are ``differentiable``, by default all floating ones.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
            ctx.save_for_backward(*tensors, *output)
            ctx.numbers = inputs[len(tensors) :]
            if differentiable is not None:
                ctx.mark_non_differentiable(*output[differentiable:])
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # read once: under activation checkpointing a second read raises
            results = saved[-len(grads) :]
            pairs = list(zip(grads, results, strict=True))[:differentiable]
            first, *others = (grad for grad, x in pairs if x.is_floating_point())
            first = torch.zeros_like(results[0]) if first is None else first
            found = backward(first, *others, *saved, *ctx.numbers)
            return *found, *(None,) * (len(saved) - len(results) + len(ctx.numbers) - len(found))

        self.register_autograd(differentiate, setup_context=save)

    def _with_derivatives(self, *args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if any(unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{self.name} has no forward-mode derivative; use impl='reference'")
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self._below_autograd(*args)
        with enable_single_level_autograd_function():
            return self._function.apply(*args)

    def _forward(self, *args: Any) -> Any:
        # A Function turns gradients off inside, but the outer levels of torch.func still need theirs.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return self._below_autograd(*args)

    def _below_autograd(self, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self._operator(*args)

    def _no_backward(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.name} has no derivative (of this order); use impl='reference'")


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
