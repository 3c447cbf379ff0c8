"""Print the frames from a call to the launch of a kernel: ``python tests/support/frames.py``.

Triton kernels run in its interpreter. A *launch* is the call of a Triton kernel or, with ``impl="sdpa"``, of a product
of PyTorch. Frames of PyTorch and of other libraries do not count. Those of an operator (``opaque.py``,
``replay.py``) count apart: they are what lets ``torch.compile`` and ``torch.func`` pass through it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from flexnsa import NativeSparseAttention
from flexnsa.attention.triton.kernels.kernel import Kernel
from tests.support.inputs import SMALL

LIBRARY = Path(__file__).parents[2] / "flexnsa"
OF_OPERATORS = {"operators/opaque.py", "operators/replay.py"}
PRODUCTS = {"mm", "bmm", "baddbmm", "scaled_dot_product_attention"}
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

Stack = list[tuple[str, str]]
"""The file and the function of each frame, the outermost first."""


def deepest(call: Callable[[], Any], impl: str) -> Stack:
    """Give the deepest stack at a launch of attention."""
    found: Stack = []

    def note(frame: FrameType) -> None:
        nonlocal found
        stack = _frames(frame)
        if len(stack) > len(found) and any(file.startswith("attention/") for file, _ in stack):
            found = stack

    def of_grid(self: Kernel, grid: Any) -> Callable[..., None]:
        note(sys._getframe())
        return launch_of_grid(self, grid)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            launches = frame.f_code.co_name == "__call__" and str(frame.f_locals.get("self")).startswith(FLASH)
        else:
            launches = event == "c_call" and getattr(argument, "__name__", "") in PRODUCTS
        if launches:
            note(frame)

    launch_of_grid = Kernel.__getitem__
    with mock.patch.object(Kernel, "__getitem__", of_grid):
        sys.setprofile(look if impl == "sdpa" else None)  # it would look at each call of the interpreter, too
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


def _frames(frame: FrameType | None) -> Stack:
    """Give the frames of the library around a launch, but for a converted model around its layer."""
    stack: Stack = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if LIBRARY in path.parents and path.name not in {"kernel.py", "converted.py"}:
            stack.insert(0, (path.relative_to(LIBRARY).as_posix(), frame.f_code.co_name))
        frame = frame.f_back
    return stack


def layer(impl: str) -> NativeSparseAttention:
    torch.manual_seed(0)
    return NativeSparseAttention(32, 4, 1, 16, config=SMALL, impl=impl)


def rows(length: int = 40) -> Tensor:
    return torch.randn(1, length, 32)


def training(impl: str) -> Callable[[], Any]:
    return lambda: layer(impl)(rows())


def backward(impl: str) -> Callable[[], Any]:
    out = layer(impl)(rows()).sum()
    return out.backward


def step(impl: str) -> Callable[[], Any]:
    module = layer(impl)
    cache = module.new_cache(1, 64)

    @torch.no_grad()
    def decode() -> None:
        module(rows(1), cache=cache)

    with torch.no_grad():
        module(rows(40), cache=cache)
    return decode


def of_model(model: Any) -> Callable[[], Any]:
    tokens = torch.arange(70)[None] % 60
    return lambda: model(tokens, use_cache=False)


def dropin(impl: str) -> Callable[[], Any]:
    from tests.integrations.transformers.families import FEW, sparse

    return of_model(sparse("llama", FEW | {"impl": impl}, head_dim=16).float())


def converted(impl: str) -> Callable[[], Any]:
    from flexnsa.transformers import convert
    from tests.integrations.transformers.families import dense

    return of_model(convert(dense("llama", head_dim=16).float(), SMALL, impl=impl))


def torchtitan(impl: str) -> Callable[[], Any]:
    from tests.integrations.torchtitan.models import built

    model = built("llama", impl=impl)
    return lambda: model(torch.arange(70)[None] % 60)


PATHS: dict[str, tuple[Callable[[str], Callable[[], Any]], str]] = {
    "training, forward": (training, "triton"),
    "training, backward": (backward, "triton"),
    "training, forward on a CPU": (training, "sdpa"),
    "training, backward on a CPU": (backward, "sdpa"),
    "a decoding step": (step, "triton"),
    "a decoding step on a CPU": (step, "sdpa"),
    "a drop-in model": (dropin, "triton"),
    "a converted model": (converted, "triton"),
    "torchtitan": (torchtitan, "triton"),
}


def main(names: list[str]) -> None:
    """Print a line for each path, and its frames."""
    for name in names or PATHS:
        make, impl = PATHS[name]
        stack = deepest(make(impl), impl)
        own = [entry for entry in stack if entry[0] not in OF_OPERATORS]
        print(
            f"{name}: {len(own)} frames in {len({file for file, _ in own})} files, {len(stack) - len(own)} of operators"
        )
        print("".join(f"    {file}: {function}\n" for file, function in stack))


if __name__ == "__main__":
    main(sys.argv[1:])
