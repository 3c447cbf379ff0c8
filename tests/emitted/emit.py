"""Let Inductor write the code of a function for the pretended device, forward and backward.

The function goes through ``torch.compile`` and all of Inductor, on fake tensors. Only the last step is another: the
Python module that Inductor wrote is kept as text, because to load it would need a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexnsa.attention.triton.kernels.kernel import Kernel
from tests.emitted.modules import Emitted, Module

MakeArguments = Callable[[], tuple[Any, ...]]
"""Makes the arguments of a function, on no particular device: emitting calls it with the pretended one as default."""


def emit(
    function: Callable[..., Any],
    make_arguments: MakeArguments,
    *,
    dynamic: bool = False,
    backward: bool = True,
    others: Sequence[MakeArguments] = (),
    ahead: bool = False,
) -> Emitted:
    """Compile ``function`` for the pretended device, and give what was written.

    Whatever a compiler raises, it raises here too: a graph break, a kernel that does not fit, a recompilation.

    Args:
        function: every tensor that it reads is one of its arguments, alone or in lists and dicts.
        make_arguments: what it is compiled with.
        dynamic: whether sizes are symbols.
        backward: whether gradients are wanted; an argument has to require one.
        others: makes arguments that must not compile it again.
        ahead: whether our own kernels begin to compile meanwhile.
    """
    from torch._inductor import compile_fx

    emitted, seen = Emitted(), dict[str, Any]()

    def backend(traced: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        seen["example"] = [node.meta["example_value"] for node in traced.graph.find_nodes(op="placeholder")]
        emitted.graph = cast(Callable[..., Sequence[Any]], compile_fx.compile_fx(traced, example))

        def run(*inputs: Any) -> Any:
            """Run the graph on fake tensors, and see which ones go in and come out."""
            seen.update(inputs=inputs, outputs=traced(*inputs))
            return seen["outputs"]

        return run

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    with _compiling_for_nothing(backward=backward, ahead=ahead), _keeping_text(emitted):
        for number, make in enumerate((make_arguments, *others)):
            with torch.device("cuda"):
                args = make()
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                result = compiled(*args)
            if number == 0:
                leaves = pytree.tree_leaves(args)
                emitted.inputs = _inputs(seen["example"], seen["inputs"], leaves)
                emitted.outputs = _outputs(result, seen["outputs"], leaves)
                emitted.structure = pytree.tree_structure(result)
    return emitted


@contextmanager
def _compiling_for_nothing(*, backward: bool, ahead: bool) -> Iterator[None]:
    """Compile fake tensors, with no cache, no other process and nothing timed; the backward pass right away."""
    from torch._functorch import config as autograd_config
    from torch._inductor import config as inductor_config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(fx_graph_cache=False, compile_threads=1, shape_padding=False))
        stack.enter_context(
            autograd_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=backward)
        )
        stack.enter_context(torch.set_grad_enabled(backward))
        if not ahead:
            stack.enter_context(mock.patch.object(Kernel, "compile_ahead"))
        stack.enter_context(FakeTensorMode(shape_env=ShapeEnv()))
        yield


@contextmanager
def _keeping_text(emitted: Emitted) -> Iterator[None]:
    """Keep what Inductor writes instead of loading it."""
    from torch._inductor.graph import GraphLowering

    def keep(lowering: GraphLowering, code: Any) -> SimpleNamespace:
        forward = "inference" if lowering.is_inference else "forward"
        module = Module("backward" if lowering.is_backward else forward, code.value, dict(lowering.constants))
        emitted.modules.append(module)
        return SimpleNamespace(call=module, __file__=f"<{module.direction}>")  # all that Inductor looks at

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", keep):
        yield


def _inputs(example: Sequence[Any], inputs: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Trace every input of a graph to an argument, or to a dimension of one."""
    place = {id(argument): number for number, argument in enumerate(arguments)}
    sizes: dict[str, tuple[int, int]] = {}
    for symbol, value in zip(example, inputs, strict=True):
        if isinstance(symbol, Tensor) and id(value) in place:
            for dim, size in enumerate(symbol.shape):
                sizes.setdefault(str(size), (place[id(value)], dim))
    found: list[tuple[int, int | None]] = []
    for symbol, value in zip(example, inputs, strict=True):
        if isinstance(symbol, Tensor) and id(value) in place:
            found.append((place[id(value)], None))
        elif str(symbol) in sizes:
            found.append(sizes[str(symbol)])
        else:
            raise ValueError(f"{symbol} is neither an argument nor a size of one")
    return found


def _outputs(result: Any, outputs: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[str, int]]:
    """Trace every tensor of a result to an output of the graph, or to an argument."""
    places = {id(argument): ("arguments", number) for number, argument in enumerate(arguments)}
    places |= {id(output): ("graph", number) for number, output in enumerate(outputs)}
    return [places[id(leaf)] for leaf in pytree.tree_leaves(result)]
