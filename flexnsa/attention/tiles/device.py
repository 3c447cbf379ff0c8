"""What tiles depend on: what a device has, and how sizes become tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch

AMPERE, HOPPER, BLACKWELL = 8, 9, 10


@dataclass(frozen=True, slots=True)
class Device:
    """What tiles depend on: bytes of shared memory of one program, and the generation whose instructions it has."""

    shared_memory: int
    generation: int

    def buffers(self, stages: int, dtype: torch.dtype) -> int:
        """Count the tiles in flight that lie in shared memory: on Hopper and later 16-bit products read them there."""
        return stages if self.generation >= HOPPER and dtype.itemsize == 2 else max(1, stages - 1)


class _Properties(Protocol):
    """What is asked of torch's properties of a device, which have no types."""

    shared_memory_per_block_optin: int
    multi_processor_count: int
    major: int


def device_of(x: torch.Tensor) -> Device:
    """Describe the device of a tensor, also to a compiler; the interpreter on a CPU passes for a Hopper."""
    if x.device.type != "cuda":
        return Device(227 * 1024, HOPPER)
    properties = _properties(x)
    return Device(properties.shared_memory_per_block_optin, generation_of(properties.major))


def multiprocessors(x: torch.Tensor) -> int:
    """Count the multiprocessors of the device of a tensor; the interpreter on a CPU passes for a small one."""
    return _properties(x).multi_processor_count if x.is_cuda else 4


def _properties(x: torch.Tensor) -> _Properties:
    return cast("_Properties", torch.cuda.get_device_properties(x.device))  # pyright: ignore[reportUnknownMemberType]


def generation_of(major: int) -> int:
    """Give the generation of a compute capability; Ada and the Blackwell of desktops (12) multiply as Ampere does."""
    return {9: HOPPER, 10: BLACKWELL, 11: BLACKWELL}.get(major, AMPERE)


def cdiv(x: int, y: int) -> int:
    """Divide and round up."""
    return -(-x // y)


def padded(size: int, least: int = 16) -> int:
    """Round up to a power of two; a product is 16 wide at least."""
    return max(least, 1 << (size - 1).bit_length())
