"""What the benchmark of the selected branch measures: shapes, and how their kernels may be cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of one call, in bf16."""

    name: str
    length: int
    q_heads: int
    kv_heads: int
    dim: int = 128
    batch: int = 1
    block_size: int = 64
    num_selected: int = 16
    documents: int = 1

    def small(self, length: int = 64) -> Shape:
        """The same in small, for a CPU."""
        group = self.q_heads // self.kv_heads
        return replace(self, length=length, q_heads=group, kv_heads=1, dim=16, batch=1, block_size=16, num_selected=4)


M7C_8K = Shape("m7c-125m 8k", 8192, 12, 2, 64, batch=4)
M7C_32K = Shape("m7c-125m 32k", 32768, 12, 2, 64)
G16_8K, G16_32K, G16_64K = (Shape(f"G16 {n}k", n * 1024, 64, 4) for n in (8, 32, 64))
SHAPES = [
    M7C_8K,
    G16_8K,
    G16_64K,
    M7C_32K,
    G16_32K,
    *(Shape(f"G{64 // heads} {n}k", n * 1024, 64, heads) for n in (8, 64) for heads in (16, 8, 64)),
    *(Shape(f"G6 {n}k", n * 1024, 60, 10) for n in (8, 64)),
    Shape("G16 8k, 16 documents", 8192, 64, 4, documents=16),
    *(Shape(f"G{64 // heads} 32k", 32768, 64, heads) for heads in (16, 8, 64)),
    Shape("G6 32k", 32768, 60, 10),
]
TUNED = [M7C_8K, G16_64K, G16_8K, Shape("G4 64k", 65536, 64, 16)]


@dataclass(frozen=True)
class Variant:
    """Fields of ``Tiles`` that differ from what the table gives, and numbers of the operator's module that do."""

    name: str
    forward: dict[str, Any] = field(default_factory=dict)
    backward: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)


def _cut(queries: int, warps: int, stages: int, **others: Any) -> dict[str, Any]:
    return {"queries": queries, "num_warps": warps, "num_stages": stages, **others}


_FORWARD = [
    _cut(64, 4, 2, max_registers=168),
    _cut(64, 4, 2, max_registers=None),
    _cut(64, 4, 2, max_registers=128),
    _cut(64, 4, 3, max_registers=168),
    _cut(128, 4, 2, max_registers=None),
    _cut(128, 8, 2, max_registers=None),
]
_BACKWARD = [_cut(*cut) for cut in ((64, 4, 2), (64, 4, 2), (128, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 2))]


def _name(cut: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in cut.items())


VARIANTS = [
    Variant("as the table says"),
    *(Variant(f"{_name(f)} | {_name(b)}", f, b) for f, b in zip(_FORWARD, _BACKWARD, strict=True)),
]
LIMITS = [
    Variant("CHUNK 4096", limits={"CHUNK": 4096}),
    Variant("CHUNK 16384", limits={"CHUNK": 16384}),
    Variant("LIST_QUERIES 256", limits={"LIST_QUERIES": 256}),
    Variant("LIST_QUERIES 1024", limits={"LIST_QUERIES": 1024}),
    Variant("WORKSPACE 1 GiB", limits={"WORKSPACE_BYTES": 2**30}),
    Variant("WORKSPACE 4 GiB", limits={"WORKSPACE_BYTES": 2**32}),
]
