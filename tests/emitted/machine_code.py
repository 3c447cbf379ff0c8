"""Compile kernels to machine code of the pretended device, and say what that takes of it.

Triton and the assembler that it brings are cross compilers. Names, alignment and options are those of a real launch.
How much shared memory a kernel takes is known before LLVM and the assembler begin, which take most of the time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from flexnsa.attention.triton.kernels.kernel import Kernel
from tests.emitted import modules

USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:\d+ LOCAL:(?P<local>\d+)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel needs.

    Args:
        kernel: its name.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        registers: of a thread; 255 is the most. None without machine code.
        spilled: bytes of a thread that found no register.
        shared: bytes of shared memory of a program.
        columns: of Blackwell's tensor memory, of 512 that a program can have.
    """

    kernel: str
    num_warps: int
    num_stages: int
    registers: int | None
    spilled: int | None
    shared: int
    columns: int


def resources(kernel: modules.Kernel, **options: int) -> Resources:
    """Compile the first configuration of a kernel that Inductor wrote, with other ``options``."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    tuner = kernel.autotuner
    config = tuner.configs[0]
    meta = tuner._create_compile_meta(config)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = tuner._create_compile_options(config, meta) | options
    return _of_binary(kernel.name, triton.compile(source, driver.active.get_current_target(), options))


@contextmanager
def compiling_launches() -> Iterator[dict[Resources, None]]:
    """Compile the Triton kernels that are launched, on fake tensors, and do not run them: a set, in their order."""
    from triton.runtime.jit import MockTensor

    found = dict[Resources, None]()

    def compile_now(self: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        args = tuple(MockTensor(x.dtype) if isinstance(x, Tensor) else x for x in args)
        binary = self.function.warmup(*args, grid=grid, **options)
        found[_of_binary(self.function.__name__, binary)] = None

    with mock.patch.object(Kernel, "compile_ahead", compile_now):
        yield found


@contextmanager
def without_machine_code() -> Iterator[None]:
    """Compile kernels as far as shared memory is allotted, which is before LLVM."""
    from triton import knobs

    def shorten(*pipeline: Any) -> tuple[str, str]:
        """Replace the last stages, or say how caches shall tell the kernels from whole ones."""
        if pipeline:
            _, stages, *_ = pipeline
            stages["llir"] = partial(_allot, stages["llir"])
            stages["ptx"] = lambda _, metadata: metadata.setdefault("name", "unnamed")
            stages["cubin"] = lambda *_: b""
        return "without machine code", "without machine code"

    with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", shorten):
        yield


def _allot(make_llir: Callable[..., str], module: Any, metadata: dict[str, Any]) -> str:
    """Run the passes that come before those to LLVM."""
    from triton._C.libtriton import nvidia

    def stop(passes: Any, *_: object) -> None:
        passes.run(module, "allot")
        raise InterruptedError

    with mock.patch.object(nvidia.passes.ttgpuir, "add_to_llvmir", stop), suppress(InterruptedError):
        make_llir(module, metadata)
    metadata["num_warps"] = module.get_int_attr("ttg.total-num-warps") or metadata["num_warps"]
    metadata |= {
        "shared": module.get_int_attr("ttg.shared"),
        "tmem_size": module.get_int_attr("ttg.tensor_memory_size"),
    }
    return ""


def _of_binary(name: str, binary: Any) -> Resources:
    registers, spilled = _usage(binary.asm["cubin"])
    metadata = binary.metadata
    return Resources(
        kernel=name,
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=registers,
        spilled=spilled,
        shared=metadata.shared,
        columns=metadata.tmem_size or 0 if hasattr(metadata, "tmem_size") else 0,
    )


def _usage(cubin: bytes) -> tuple[int | None, int | None]:
    """Give the registers of machine code, and the bytes that it spills."""
    if not cubin:
        return None, None
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    usage = USAGE.search(text)
    if usage is None:
        raise ValueError(f"{tool} says nothing of resources: {text[-500:]}")
    return int(usage["registers"]), int(usage["stack"]) + int(usage["local"])
