"""The process that runs emitted modules on CPU tensors, in Triton's interpreter, each in a fork of its own.

Imports take longer than most modules, so one process has them and forks. A line of its input names the files of a
request and of the answer; it writes the fork's exit status, a line, when that ends.

Inductor's launcher takes interpreted kernels. What remains is to point the names of CUDA in a generated module at the
CPU, and to give the interpreter what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.interpreter import hurry, teach_bfloat16

PREDICATES = ("isnan", "isinf", "signbit")
OTHER_NAMES = {"fast_tanhf": "tanh", "nearbyint": "round", "llrint": "round"}


class Libdevice:
    """CUDA's mathematical functions, computed by torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Give a function of interpreted tensors, the first of which determines the type of the result."""
        from triton import language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, OTHER_NAMES.get(name, name))

        def compute(*args: Any) -> Any:
            first = next(x for x in args if isinstance(x, tl.tensor))
            dtype = tl.int32 if name in PREDICATES else first.dtype
            result = function(*(torch.as_tensor(x.handle.data if isinstance(x, tl.tensor) else x) for x in args))
            result = result.int().numpy() if name in PREDICATES else result.numpy()
            shape = list(first.shape)
            return tl.tensor(TensorHandle(result, dtype), tl.block_type(dtype, shape) if shape else dtype)

        return compute


def prefer_large_tiles() -> None:
    """Of the configurations among which a GPU would choose, take that of the fewest programs: each costs time."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    original = CachingAutotuner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.configs.sort(key=lambda config: -math.prod(config.kwargs.values()))

    setattr(CachingAutotuner, "__init__", init)  # noqa: B010


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of NaN, so that what is read before it is written shows in the results."""
    x = torch.empty_strided(size, stride, dtype=dtype)
    return x.fill_(torch.nan) if dtype.is_floating_point else x


def turn_to_cpu() -> None:
    """Replace what generated modules call of CUDA."""
    from torch._C._dynamo import guards
    from torch._inductor.runtime import triton_helpers

    replacements: tuple[tuple[object, str, object], ...] = (
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),  # noqa: ARG005
        (guards, "_empty_strided_cuda", empty_strided),
        (torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),  # noqa: ARG005
        (torch.cuda, "set_device", lambda index: None),  # noqa: ARG005
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (triton_helpers, "libdevice", Libdevice()),
    )
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def is_same(a: Any, b: Any) -> bool:
    """Tell whether an argument is what it was, NaN included."""
    return not isinstance(a, Tensor) or bool(((a == b) | ((a != a) & (b != b))).all())


def run(request: Path, answer: Path) -> None:
    """Run the ``call`` of a module; leave its outputs, and the arguments that it changed."""
    source, constants, args = torch.load(request)
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    module = ModuleType("emitted")
    vars(module).update(constants)
    exec(
        compile(source.replace("device(type='cuda', index=0)", "device(type='cpu')"), "<emitted>", "exec"), vars(module)
    )
    with np.errstate(all="ignore"):
        outputs = tuple(module.call(list(args)))
    changed = {i: now for i, (now, then) in enumerate(zip(args, before, strict=True)) if not is_same(now, then)}
    torch.save((outputs, changed), answer)


def serve() -> None:
    """Fork for each request until the input ends; what a module prints goes to standard error."""
    statuses = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=statuses)
            continue
        status = 1
        try:
            request, answer = map(Path, json.loads(line))
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(request.parent)
            run(request, answer)
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)


def import_early() -> None:
    """Import what every module imports, once for all forks."""
    from torch._inductor import select_algorithm  # noqa: F401
    from torch._inductor.codegen import memory_planning  # noqa: F401

    from flexnsa.attention import dispatch  # noqa: F401


if __name__ == "__main__":
    import_early()
    turn_to_cpu()
    teach_bfloat16()
    hurry()
    prefer_large_tiles()
    serve()
