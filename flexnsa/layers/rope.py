"""Rotary position embedding of each head (arXiv 2104.09864), in the half-split layout."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn the pairs ``(x[i], x[i + D/2])`` of each head by the token's position.

    Args:
        x: ``(B, H, T, D)``, D even.
        positions: int ``(T,)`` or ``(B, T)``, in tokens.
        base: wavelength scale; pair ``i`` turns by ``position * base ** (-2i / D)`` radians.

    Returns:
        The shape and dtype of x; computed in fp32.
    """
    return turn(x, *rotation(positions, x.shape[-1], base))


def rotation(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Give the cosines and sines of :func:`rotate`, fp64 ``(T, dim / 2)`` or ``(B, 1, T, dim / 2)``."""
    # fp64 angles: in fp32 a position of a million would be off by 0.06 radians.
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angle = positions[..., None].to(torch.float64) * frequency
    if positions.dim() == 2:
        angle = angle[:, None]
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of each head of ``x (B, H, T, D)`` by a :func:`rotation`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
