"""Run emitted modules on a CPU, forward and backward: every kernel in Triton's interpreter, on the grid it would have.

Modules run in another process (:mod:`tests.emitted.interpreter`), because the interpreter is chosen when Triton is
first imported, and the process that emits needs the compiler.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flexnsa.attention.interface import given
from tests.emitted.modules import Emitted, Module

ROOT = Path(__file__).parents[2]


def interpreted(emitted: Emitted) -> Callable[..., Any]:
    """Give the emitted function for tensors on a CPU, differentiable, of the shapes that it was emitted for."""
    graph, structure = given(emitted.graph), given(emitted.structure)
    for module in emitted.modules:
        module.run = _run

    def call(*args: Any) -> Any:
        arguments = pytree.tree_leaves(args)
        inputs = [arguments[place] if dim is None else arguments[place].size(dim) for place, dim in emitted.inputs]
        values = {"graph": graph(*inputs), "arguments": arguments}
        return pytree.tree_unflatten([values[origin][number] for origin, number in emitted.outputs], structure)

    return call


def _run(module: Module, args: list[Any]) -> Sequence[Any]:
    """Run a module in the other process, also for what it does to its arguments."""
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in args]
    args.clear()  # a generated module takes its arguments over
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "request.pt"), Path(folder, "answer.pt")
        torch.save((module.source, module.constants, inputs), request)
        requests, statuses = _interpreter()
        print(json.dumps([str(request), str(answer)]), file=requests, flush=True)
        status = statuses.readline().strip()
        assert status == "0", f"the interpreter ended with status {status or 'unknown'}"
        outputs, changed = torch.load(answer)
    for number, value in changed.items():
        inputs[number].copy_(value)
    return outputs


@functools.cache
def _interpreter() -> tuple[IO[str], IO[str]]:
    """Start the process; it ends when this one does, which closes its input."""
    own = {"TRITON_INTERPRET": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.emitted.interpreter"]
    process = subprocess.Popen(command, env=os.environ | own, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return given(process.stdin), given(process.stdout)
