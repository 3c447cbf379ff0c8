"""The properties of a device that tiles depend on, and the rounding of sizes to tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch

T = TypeVar("T")

AMPERE, HOPPER, BLACKWELL = 8, 9, 10
ALIGNMENT = 16
"""Triton compiles a variant of its own for addresses, in bytes, and numbers that are multiples of this."""


@dataclass(frozen=True, slots=True)
class Device:
    """The shared memory of one program, in bytes, and the generation of a device's instructions."""

    shared_memory: int
    generation: int

    def buffers(self, stages: int, dtype: torch.dtype) -> int:
        """Return how many of the staged tiles are in shared memory: all where 16-bit products read them there."""
        return stages if self.generation >= HOPPER and dtype.itemsize == 2 else max(1, stages - 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters of a kernel: queries and keys of a tile, warps of a program, stages, a limit of registers.

    A kernel that heads of a group share counts (query, head) rows; one that scores counts blocks for keys.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self, stages: str = "num_stages") -> dict[str, int]:
        """Return the keyword arguments of a launch that are no sizes; a kernel may have ``stages`` of its own."""
        options = {"num_warps": self.num_warps, stages: self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def first_that_fits(candidates: Iterable[T], bytes_of: Callable[[T], float], device: Device, error: str) -> T:
    """Return the first tiles that fit shared memory.

    Raises:
        ValueError: none fit.
    """
    for tiles in candidates:
        if bytes_of(tiles) <= device.shared_memory:
            return tiles
    other = "" if "impl='flex'" in error else "; use impl='flex'"
    raise ValueError(f"{error} {device.shared_memory} bytes of shared memory, which none does here{other}")


class _Properties(Protocol):
    """The used attributes of torch's device properties, which have no types."""

    shared_memory_per_block_optin: int
    multi_processor_count: int
    major: int


def device_of(x: torch.Tensor) -> Device:
    """Return the device of a tensor, also under ``torch.compile``; Triton's interpreter on a CPU counts as Hopper."""
    return properties_of(x.device)


def properties_of(device: torch.device) -> Device:
    """Return the device as :func:`device_of` does."""
    if device.type != "cuda":
        return Device(227 * 1024, HOPPER)
    properties = _properties(device)
    return Device(properties.shared_memory_per_block_optin, generation_of(properties.major))


def multiprocessors(x: torch.Tensor) -> int:
    """Return the multiprocessors of a tensor's device; Triton's interpreter on a CPU counts as a small one."""
    return _properties(x.device).multi_processor_count if x.is_cuda else 4


def _properties(device: torch.device) -> _Properties:
    return cast("_Properties", torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]


def generation_of(major: int) -> int:
    """Return the generation of a compute capability; Ada and desktop Blackwell (12) multiply like Ampere."""
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(major, AMPERE)


def cdiv(x: int, y: int) -> int:
    """Divide and round up."""
    return -(-x // y)


def padded(size: int, least: int = 16) -> int:
    """Round up to a power of two, at least ``least``; the operands of a product need 16."""
    return max(least, 1 << (size - 1).bit_length())
