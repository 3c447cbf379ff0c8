"""Make a process with a CPU build of PyTorch believe that it has a GPU, so that compilers write code for that.

Tensors on the pretended device must be fake ones, of a shape and nothing else; no kernel can run on it. The pretence
is of the whole process and for good.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emitted.targets import Target


def pretend(target: Target) -> None:
    """Set up the device of this process.

    Raises:
        RuntimeError: the build of PyTorch has CUDA itself, whose libraries would clash with a pretended device.
    """
    if torch.version.cuda or torch.version.hip:
        raise RuntimeError(f"kernels are emitted by a CPU build of PyTorch, this is {torch.__version__}")
    _install_hooks()
    _answer_for_torch(target)
    _answer_for_triton(target)
    _keep_inductor_off_the_device()


def _install_hooks() -> None:
    """Compile the C++ half with the compiler that Inductor finds, into Inductor's cache."""
    from torch._inductor.codecache import CppCodeCache

    library: Any = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text())
    library.install_pretended_hooks()


def _answer_for_torch(target: Target) -> None:
    """Replace what would ask a driver."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode

    properties = SimpleNamespace(
        name=target.gpu,
        major=target.capability[0],
        minor=target.capability[1],
        multi_processor_count=target.multiprocessors,
        total_memory=target.memory_gb << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=target.shared_memory,
        shared_memory_per_multiprocessor=target.shared_memory + 1024,
        L2_cache_size=target.l2_mb << 20,
        gcnArchName="",
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: 0,
        "_exchange_device": lambda device: 0,  # noqa: ARG005
        "_maybe_exchange_device": lambda device: 0,  # noqa: ARG005
        "get_device_properties": lambda device=None: properties,  # noqa: ARG005
        "get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8, device="cpu"),  # noqa: ARG005
        "set_rng_state": lambda state, device=0: None,  # noqa: ARG005
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, public := name.lstrip("_")):  # Dynamo keeps its own
            setattr(CudaInterface, public, staticmethod(answer))
    setattr(torch.version, "cuda", "13.0")  # noqa: B010
    # Fake tensors must not ask the device, as for torch.tensor(1.0, device="cuda").
    setattr(FakeTensorMode, "avoid_device_init", property(lambda mode: True))  # noqa: ARG005, B010


def _answer_for_triton(target: Target) -> None:
    """Be the driver, as far as compiling goes, of kernels that nobody debugs."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    properties = {
        "max_shared_mem": target.shared_memory,
        "max_num_regs": 65536,
        "multiprocessor_count": target.multiprocessors,
        "warpSize": 32,
    }
    answers: dict[str, Callable[..., Any]] = {
        "is_active": lambda: True,
        "get_current_target": lambda: GPUTarget("cuda", target.number, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,  # noqa: ARG005
        "get_active_torch_device": lambda: torch.device("cuda", 0),
        "get_device_interface": lambda: torch.cuda,
    }
    utils = SimpleNamespace(get_device_properties=lambda device: properties)  # noqa: ARG005
    knobs.compilation.disable_line_info = True  # a fifth of the time; the machine code is the same
    driver.set_active(cast(Any, SimpleNamespace(utils=utils, **answers)))


class _OnCpu(TorchDispatchMode):
    """Let what asks for the pretended device have its tensors on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cpu = torch.device("cpu")
        moved: Any = pytree.tree_map_only(torch.device, lambda _: cpu, (args, kwargs or {}))
        return func(*moved[0], **moved[1])


def _keep_inductor_off_the_device() -> None:
    """Change the few places where Inductor itself computes on the device, or loads a driver."""
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton

    def on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            with _OnCpu():
                return method(*args)

        return wrapper

    for answer in vars(_triton).values():  # given before there was a device
        if hasattr(answer, "cache_clear"):
            answer.cache_clear()
    for name in ("_add_peephole_patterns", "_deduce_value"):
        setattr(UniformValueConstantFolder, name, on_cpu(getattr(UniformValueConstantFolder, name)))
    setattr(triton_helpers, "set_driver_to_gpu", lambda: None)  # noqa: B010
