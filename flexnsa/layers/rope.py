"""Rotary position embedding of each head (arXiv 2104.09864), in the half-split layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flexnsa.operators.opaque import opaque_operator


class RopeTables(NamedTuple):
    """Cosines and sines of the angles of ``T`` positions, ``(T, D / 2)`` or ``(B, 1, T, D / 2)``."""

    cos: Tensor
    sin: Tensor


def rope_tables(
    positions: Tensor, dim: int, base: float = 10_000.0, *, dtype: torch.dtype = torch.float32
) -> RopeTables:
    """Return tables of the angles by which heads are rotated.

    Args:
        positions: int ``(T,)`` or ``(B, T)``, in tokens.
        dim: ``D`` of the heads, even.
        base: wavelength scale; pair ``i`` is rotated by ``position * base ** (-2i / D)`` radians.
        dtype: of the tables, and of the rotation.
    """
    # fp64 angles: in fp32 a position of a million would be off by 0.06 radians.
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions[..., None].to(torch.float64) * frequency
    if positions.dim() == 2:
        angle = angle[:, None]
    return RopeTables(angle.cos().to(dtype), angle.sin().to(dtype))


def stored_rope_tables(
    positions: Tensor, dim: int, base: float = 10_000.0, *, dtype: torch.dtype = torch.float32
) -> RopeTables:
    """Return :func:`rope_tables` for many layers to share, computed once.

    Inductor would recompute powers and sines wherever they are read, and again in backward. An opaque operator
    prevents that.
    """
    return RopeTables(*_stored_tables(positions, dim, base, dtype))


@opaque_operator("rope_tables")
def _stored_tables(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rope_tables(positions, dim, base, dtype=dtype)


@_stored_tables.register_fake
def _(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    heads = [1] if positions.dim() == 2 else []
    shape = (*positions.shape[:-1], *heads, positions.shape[-1], dim // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def apply_rope(x: Tensor, tables: RopeTables) -> Tensor:
    """Rotate the pairs ``(x[i], x[i + D/2])`` of each head of ``x (B, H, T, D)``; computed in fp32 or wider.

    Heads of other dims than the tables have (``index_head_dim``) are rotated by the first angles, the rest by 0.
    """
    dtype, missing = torch.promote_types(x.dtype, torch.float32), x.shape[-1] // 2 - tables.cos.shape[-1]
    if missing:
        tables = RopeTables(F.pad(tables.cos, (0, missing), value=1.0), F.pad(tables.sin, (0, missing)))
    cos, sin = (table.to(dtype)[..., None, :] for table in tables)
    # Halves rotated one by one would be joined, and so would their gradients. Compiled code would store these, and then
    # copy them to their place in the gradient of the product that x came from.
    halves = torch.unflatten(x.to(dtype), -1, (2, -1))
    signs = torch.arange(-1, 2, 2, device=x.device)[:, None]
    rotated = halves * cos + halves.flip(-2) * sin * signs
    return rotated.flatten(-2).to(x.dtype).contiguous()
