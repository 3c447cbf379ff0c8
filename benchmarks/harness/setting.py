"""The shape, the precision, the device and the implementation of everything that is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flexnsa import MLPCompressor, NSAConfig
from flexnsa.lm import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All of a problem but its length; the default is that of published NSA times on an H200.

    Args:
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of both.
        dim: width of a layer; default: that of all query heads.
        config: of the branches.
        dtype: of all tensors.
        device: their device.
        impl: of the branches.
        backend: of ``torch.compile``; None leaves everything eager, which is how CPUs are measured.
    """

    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    dim: int | None = None
    config: NSAConfig = field(default_factory=NSAConfig)
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    impl: str = "triton"
    backend: str | None = "inductor"

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """First arguments of a layer."""
        return self.dim or self.num_heads * self.head_dim, self.num_heads, self.num_kv_heads, self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self) | {"dim": self.heads[0], "batch": 1, "dtype": str(self.dtype).removeprefix("torch.")}

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile as users would, one graph for one shape; without a backend leave it as it is."""
        if self.backend is None:
            return function
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.backend)

    def random(self, *shape: int) -> Tensor:
        """Random numbers on the device."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def draw(self, heads: int, length: int, dim: int | None = None) -> Tensor:
        """A random leaf ``(1, heads, length, dim)``."""
        return self.random(1, heads, length, self.head_dim if dim is None else dim).requires_grad_()

    def compressor(self) -> MLPCompressor:
        """The paper's compression."""
        return MLPCompressor(self.num_kv_heads, self.head_dim, config=self.config).to(self.device, self.dtype)


CPU = Setting(num_heads=12, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu", impl="sdpa", backend=None)
"""The attention of the ``large`` preset, eager."""

TINY_SIZES = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=32
)
TINY_MODEL = DecoderConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, nsa=TINY_SIZES)
"""A model for rehearsals, and the sizes of its branches."""


def large(device: str) -> Setting:
    """The attention of the ``large`` preset, as each device is measured: fp32 and eager, or bf16 and compiled."""
    return CPU if device == "cpu" else Setting(num_heads=12, num_kv_heads=2, head_dim=64)


def published(device: str, *, tiny: bool = False, dim: int | None = None, impl: str = "triton") -> Setting:
    """The shape of published times; on a CPU a rehearsal, which traces graphs and leaves Inductor out."""
    setting = Setting(device=device, dim=dim, impl=impl)
    if device == "cpu":
        setting = replace(setting, impl="sdpa", backend="aot_eager")
    if tiny:
        setting = replace(setting, num_heads=4, num_kv_heads=2, head_dim=16, dim=None, dtype=torch.float32)
    return setting
