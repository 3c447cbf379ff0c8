"""The GPUs that kernels are emitted for: what a compiler asks of a device, from NVIDIA's documents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture, as a common GPU of it.

    Args:
        capability: compute capability.
        gpu: its name.
        multiprocessors: how many it has.
        threads: resident ones of a multiprocessor, at most.
        shared_kb: KB of shared memory that one program can have.
        memory_gb: GB of memory.
        l2_mb: MB of cache.
    """

    capability: tuple[int, int]
    gpu: str
    multiprocessors: int
    threads: int
    shared_kb: int
    memory_gb: int
    l2_mb: int

    @property
    def name(self) -> str:
        """As a compiler calls it: ``sm_90``."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """The compute capability without its dot."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one program can have."""
        return self.shared_kb * 1024


TARGETS = {
    target.name: target
    for target in (
        Target((8, 0), "NVIDIA A100", 108, 2048, shared_kb=163, memory_gb=80, l2_mb=40),
        Target((8, 6), "NVIDIA A10", 72, 1536, shared_kb=99, memory_gb=24, l2_mb=6),
        Target((8, 9), "NVIDIA L40S", 142, 1536, shared_kb=99, memory_gb=48, l2_mb=96),
        Target((9, 0), "NVIDIA H200", 132, 2048, shared_kb=227, memory_gb=141, l2_mb=50),
        Target((10, 0), "NVIDIA B200", 148, 2048, shared_kb=227, memory_gb=180, l2_mb=126),
    )
}
