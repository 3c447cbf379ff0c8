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
    dim = x.shape[-1]
    # fp64 angles: in fp32 a position of a million would be off by 0.06 radians.
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = positions[..., None].to(torch.float64) * frequency
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if positions.dim() == 2:
        cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
