"""Triton's interpreter: the process of a test session that runs kernels in it, and what the interpreter lacks.

It is chosen when Triton is first imported, so it needs a process of its own: this file is its script.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

Interpret = Callable[[ModuleType, str], Any]
"""Returns what ``interpret`` of a module makes of a case, called in the process of the interpreter."""


@contextmanager
def interpreter(folder: Path) -> Iterator[Interpret]:
    """Start the process; it passes results by files in a folder, and computes each once."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreter", str(folder)]
    with subprocess.Popen(command, env=environment, **pipe) as process:
        requests, answers = process.stdin, process.stdout

        @functools.cache
        def interpret(module: ModuleType, case: str) -> Any:
            requests.write(json.dumps([module.__name__, case]) + "\n")
            line = answers.readline()
            assert line, f"the interpreter ended with {process.wait()}"
            answer = json.loads(line)
            assert "path" in answer, answer["error"]
            return torch.load(answer["path"])

        yield interpret
        requests.close()


def serve(folder: Path) -> None:
    """Answer each line of the input, a module and a case, by the file with the result or by what was raised."""
    for number, line in enumerate(sys.stdin):
        module, case = json.loads(line)
        answer = {"path": str(folder / f"{number}.pt")}
        try:
            torch.save(import_module(module).interpret(case), answer["path"])
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def teach_bfloat16() -> None:
    """Round to bfloat16, and take it in products: the interpreter keeps its bits in integers, and computes with those.

    Any other arithmetic with such numbers is refused; the kernels do theirs in float32.
    """
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast_impl, create_dot, binary_op = (
        getattr(InterpreterBuilder, name) for name in ("cast_impl", "create_dot", "binary_op")
    )

    def widened(handle: Any) -> Any:
        if handle.dtype.name != "bf16":
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.name, target.scalar.name)
        if kinds == ("bf16", "fp32"):
            return widened(source)
        if kinds == ("fp32", "bf16"):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast_impl(self, source, target)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.name == "bf16":
            raise NotImplementedError(f"bfloat16 {operation.__name__} in the interpreter")
        return binary_op(self, left, right, operation)

    for name, method in (("cast_impl", cast), ("create_dot", dot), ("binary_op", binary)):
        setattr(InterpreterBuilder, name, method)


def hurry() -> None:
    """Take a fifth of the time: look for no overflow, turn ``triton.language`` to the interpreter once, and replay."""
    from triton.runtime import interpreter

    from tests.support.replay import patch_attr

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_lang, patched, get_np_dtype = interpreter._patch_lang, set[int](), interpreter._get_np_dtype
    np_dtypes = dict[str, np.dtype[Any]]()

    def patch_once(kernel: Any) -> Any:
        if id(kernel.__globals__) not in patched:
            patched.add(id(kernel.__globals__))
            patch_lang(kernel)
        return interpreter._LangPatchScope()

    def np_dtype(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = get_np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter.__dict__.update(_patch_lang=patch_once, _patch_attr=patch_attr, _get_np_dtype=np_dtype)
    setattr(interpreter.TensorHandle, "__post_init__", lambda handle: None)  # noqa: ARG005, B010


if __name__ == "__main__":
    torch.set_num_threads(1)
    teach_bfloat16()
    hurry()
    serve(Path(sys.argv[1]))
