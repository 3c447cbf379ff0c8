"""Inputs for the tests, and the small configuration that they share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flexnsa import NSAAux, NSAConfig, native_sparse_attention
from flexnsa.config import num_compressed


def sizes(*values: int) -> NSAConfig:
    """Give the configuration of these sizes, which come in the order of its fields."""
    named: dict[str, Any] = dict(zip((field.name for field in fields(NSAConfig)), values, strict=False))
    return NSAConfig(**named)


SMALL = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=4, window_size=24)
"""The proportions of the paper's configuration, a quarter of its size."""
TINY = NSAConfig(compress_block_size=8, compress_stride=4, select_block_size=8, num_selected_blocks=3, window_size=8)
"""For models and texts of a few tokens."""


@dataclass(frozen=True)
class Inputs:
    """All tensors that ``native_sparse_attention`` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """Fresh leaves of another dtype that require gradients."""
        return Inputs(**{name: x.detach().to(dtype).requires_grad_() for name, x in self.named().items()})

    def named(self) -> dict[str, Any]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def replace(self, **changes: Tensor) -> Inputs:
        """A copy with some tensors exchanged."""
        return replace(self, **changes)


def make_inputs(
    seq_len: int,
    config: NSAConfig = SMALL,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Random tensors; rounded to ``dtype`` first, so that every precision computes the same problem."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    heads, num_keys = kv_heads * group, num_compressed(seq_len, config)
    return Inputs(
        q=randn(batch, heads, seq_len, key_dim) * 2,
        k=randn(batch, kv_heads, seq_len, key_dim),
        v=randn(batch, kv_heads, seq_len, value_dim),
        k_cmp=randn(batch, kv_heads, num_keys, key_dim),
        v_cmp=randn(batch, kv_heads, num_keys, value_dim),
        k_win=randn(batch, kv_heads, seq_len, key_dim),
        v_win=randn(batch, kv_heads, seq_len, value_dim),
        gates=randn(batch, heads, seq_len, 3).sigmoid(),
    )


class OnGPU(Tensor):
    """Says that it is on a GPU, where plain maps are one product."""

    is_cuda = True


class Packed(Tensor):
    """Numbers that only their own operators know how to read, as of a quantized weight."""


def spread(x: Tensor) -> Tensor:
    """Lay tokens ``(B, H, T, D)`` so far apart that 32 bits do not reach the last; what is between is not touched."""
    batch, heads, length, dim = x.shape
    step = -(-(2**31) // (length - 1))
    storage = x.new_empty((length - 1) * step + batch * heads * dim)
    return storage.as_strided(x.shape, (heads * dim, dim, step, 1)).copy_(x)


def attend(x: Inputs, **options: Any) -> Tensor:
    """All three branches, by default in the small configuration."""
    return native_sparse_attention(**x.named(), **{"config": SMALL, **options})


def attend_with_aux(x: Inputs, **options: Any) -> tuple[Tensor, NSAAux]:
    """As :func:`attend`, with what the branches gave."""
    return native_sparse_attention(**x.named(), **{"config": SMALL, **options}, return_aux=True)
