"""What Triton's interpreter lacks, for the processes that run kernels in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


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
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def cast(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return widened(source)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast_impl(self, source, target)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            raise NotImplementedError(f"bfloat16 {operation.__name__} in the interpreter")
        return binary_op(self, left, right, operation)

    for name, method in (("cast_impl", cast), ("create_dot", dot), ("binary_op", binary)):
        setattr(InterpreterBuilder, name, method)


def hurry() -> None:
    """Halve the time: look for no overflow, and turn ``triton.language`` to the interpreter once instead of always."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_lang, patched = interpreter._patch_lang, set[int]()

    def patch_once(kernel: Any) -> Any:
        if id(kernel.__globals__) not in patched:
            patched.add(id(kernel.__globals__))
            patch_lang(kernel)
        return interpreter._LangPatchScope()

    setattr(interpreter, "_patch_lang", patch_once)  # noqa: B010
