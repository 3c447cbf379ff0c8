"""How this package makes an operator that the compiler does not look into.

It gives values and, where a backward is registered, first derivatives in reverse mode, inside the transforms of
``torch.func`` too. Whoever asks for another derivative gets an error: left alone, an opaque operator drops tangents,
and forward mode finds 0.
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

_LIBRARY = torch.library.Library("flexnsa", "FRAGMENT")


P = ParamSpec("P")
T = TypeVar("T")


def opaque_operator(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable[P, T]], OpaqueOperator[P, T]]:
    """Register a function of tensors and numbers as ``flexnsa::name``; it returns no view.

    It writes to nothing but the arguments that ``mutates`` names. Autocast stops at its door: inside, precision is
    chosen by the function alone. Kernels are launched on the GPU of its first argument, current or not.
    """

    def register(function: Callable[P, T]) -> OpaqueOperator[P, T]:
        return OpaqueOperator(name, function, mutates)

    return register


class OpaqueOperator(Generic[P, T]):
    """An operator that has the derivatives registered for it and refuses all others; see :func:`opaque_operator`.

    The dispatcher asks for derivatives once for every level of ``torch.func``, compiled or not, so this is the one
    place that sees every tangent. (``torch.library.custom_op`` leaves no room there.)
    """

    def __init__(self, name: str, function: Callable[P, T], mutates: Sequence[str]) -> None:
        @_disable_dynamo
        def kernel(*args: Any) -> T:
            device: torch.device = args[0].device
            with torch.no_grad(), torch.autocast(device.type, enabled=False), _current(device):
                return function(*args)  # pyright: ignore[reportCallIssue]  (keywords have become positions)

        self.name, self.function = f"{_LIBRARY.ns}::{name}", function
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
        """Register what makes empty results of the right shapes and dtypes."""
        torch.library.register_fake(self.name, function, lib=_LIBRARY)
        return function

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the backward; both functions are those of a :class:`torch.autograd.Function`."""
        members = {"forward": self._forward, "setup_context": setup_context, "backward": backward}
        members = {name: staticmethod(member) for name, member in members.items()}
        self._function: Any = type(self.name, (_SingleLevelFunction,), members)

    def register_backward(self, backward: OpaqueOperator[..., tuple[Tensor, ...]]) -> None:
        """Let another operator give the gradients of the first inputs; the others have none.

        It takes the gradients of the results that are floating (the first is always a tensor, another None where
        nothing depends on it), then the inputs that are tensors or None, the results, and the inputs that are numbers.
        """

        def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
            ctx.save_for_backward(*tensors, *output)
            ctx.numbers = inputs[len(tensors) :]
            ctx.set_materialize_grads(False)

        def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors  # to be read once only, where it is checkpointed
            results = saved[-len(grads) :]
            first, *others = (grad for grad, x in zip(grads, results, strict=True) if x.is_floating_point())
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
        # A Function switches derivatives off for what it calls, but outer levels of torch.func want theirs.
        with torch.enable_grad(), _set_fwd_grad_enabled(True):
            return self._below_autograd(*args)

    def _below_autograd(self, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self._operator(*args)

    def _no_backward(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.name} has no derivative (of this order); use impl='reference'")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the one that kernels are launched on, which is not where their tensors are but the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def in_transform() -> bool:
    """Tell whether a transform of ``torch.func`` is at work."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms(what: str, *tensors: Tensor) -> None:
    """Demand that no transform of ``torch.func`` is at work and that nothing has a tangent."""
    if in_transform():
        raise NotImplementedError(
            f"{what} works in no transform of torch.func (grad, vmap, jvp); use impl='sdpa', or 'reference' for jvp"
        )
    if any(unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{what} has no forward-mode derivative; use impl='reference'")
